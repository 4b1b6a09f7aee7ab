# SPDX-License-Identifier: Apache-2.0
"""One kernel for one shape, compiled once per token count that the GPU has room for."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from vllm_ling.quant.jit import Gpu, Kernel, build


class Plan(Protocol):
    """Sizes of one launch, for up to `tokens` tokens."""

    @property
    def tokens(self) -> int: ...

    @property
    def shared_bytes(self) -> int: ...


P = TypeVar("P", bound=Plan)


class KernelFamily(Generic[P]):
    """The compiled kernels of one shape.

    Attributes:
        plans: those that fit the GPU, by rising token count.
        origins: where each token count's binary came from (see `jit.build`).
        max_tokens: the most that a kernel takes.
    """

    def __init__(
        self,
        source: str,
        shape: object,
        plans: Sequence[P | None],
        defines: Callable[[P], Mapping[str, int | str]],
        gpu: Gpu,
        cache: Path | None,
    ) -> None:
        """Compiles, or takes from `cache`.

        Args:
            source: file in kernels/; its entry point has the file's name.
            shape: for messages.
            plans: by rising token count; None where the GPU lacks shared memory.
            defines: the compile-time constants of a plan.

        Raises:
            CompileError: with the compiler's log.
            ValueError: no plan fits.
        """
        self.plans = [p for p in plans if p is not None]
        if not self.plans:
            raise ValueError(f"{gpu.shared_bytes} bytes of shared memory are too few for {shape}")
        self.origins: dict[int, str] = {}
        self._kernels: dict[int, tuple[P, Kernel]] = {}
        # NVRTC lets other threads run: a cold start waits for the longest of them, not for their sum.
        with ThreadPoolExecutor(len(self.plans)) as pool:
            binaries = pool.map(lambda p: build(source, defines(p), gpu.arch, cache), self.plans)
        for p, built in zip(self.plans, binaries, strict=True):
            self.origins[p.tokens] = built.origin
            self._kernels[p.tokens] = (p, Kernel(built.cubin, source.removesuffix(".cu"), p.shared_bytes))
        self.max_tokens = self.plans[-1].tokens

    def pick(self, tokens: int) -> tuple[P, Kernel]:
        """The smallest kernel that takes `tokens` tokens, at most `max_tokens`."""
        return self._kernels[next(n for n in self._kernels if n >= tokens)]
