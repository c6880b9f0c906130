"""Have JAX follow the scopes, too: a complete plug-in, and what JAX makes of it."""

from concurrent.futures import ThreadPoolExecutor

import jax

from precision_scope import Float32MatmulPrecision, matmul_precision
from precision_scope.backends import Backend, register_backend


class JaxBackend(Backend):
    """JAX's process-wide precision; jax.default_matmul_precision still decides within its own thread."""

    name = module = "jax"

    def save(self) -> object:
        """Return the process-wide setting, as JAX spells it."""
        with ThreadPoolExecutor(1) as pool:  # 0.1 ms, but a thread that is in no scope of JAX's
            return pool.submit(lambda: jax.config.jax_default_matmul_precision).result()

    def apply(self, level: Float32MatmulPrecision) -> None:
        """Set a level; JAX compiles anew where it changes."""
        self.restore({"highest": "highest", "high": "high", "medium": "default"}[level])

    def restore(self, saved: object) -> None:
        """Set it back."""
        jax.config.update("jax_default_matmul_precision", saved)

    def describe(self) -> dict[str, str]:
        """Tell the setting."""
        return {"jax_default_matmul_precision": str(self.save())}


if __name__ == "__main__":
    register_backend(JaxBackend())
    for level in ("highest", "high", "medium"):
        with matmul_precision(level):
            program = jax.jit(jax.numpy.matmul).lower(*jax.numpy.ones((2, 2, 2))).as_text()
            print(level, program[program.index("precision = [") :].split("]")[0] + "]")
