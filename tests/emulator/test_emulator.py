# SPDX-License-Identifier: Apache-2.0
"""The emulator itself: what it refuses, what it catches, and that its schedules differ."""

import ctypes
from pathlib import Path

import pytest
import torch

from tests.emulator.build import KERNELS
from tests.emulator.emulator import EmulatedKernel, Emulator
from tests.emulator.launches import EmulationError
from tests.emulator.translate import TranslationError, assembler, translate
from vllm_ling.quant.jit import CompileError

HEAD = """#include "cluster.cuh"
#include "mla_keys.cuh"
extern "C" __global__ void tried(uint32_t *data) {
  extern __shared__ uint4 dynamic[];
  uint32_t *shared = (uint32_t *)dynamic;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
"""


def launch(
    emulator: Emulator, folder: Path, body: str, threads: int = 64, ctas: int = 2, pdl: bool = False
) -> torch.Tensor:
    """Runs `body` as a kernel with 256 words of shared memory and a cluster of all its CTAs; its 256 words `data`."""
    (folder / "tried.cu").write_text(HEAD + body + "\n}\n")
    data = torch.zeros(256, dtype=torch.int32)
    kernel = EmulatedKernel(emulator, str(folder / "tried.cu"), {"USE_PDL": int(pdl)}, 1024)
    kernel.launch((ctas, 1), threads, (data.data_ptr(),), (ctypes.c_void_p,), 0, pdl, cluster=ctas)
    return data


WRONG = {
    "a barrier that not all reach": ("if (warp == 0) __syncthreads();", "wait for each other"),
    "lanes that do different things": (
        "if (lane) __syncwarp(); else __shfl_sync(~0u, 1, 0);",
        r"while other lanes wait in __(syncwarp|shfl_sync)",
    ),
    "masks that overlap": ("if (lane) __syncwarp(~1u); else __syncwarp();", "with another mask"),
    "a lane outside its mask": ("__syncwarp(1);", "not in its own mask"),
    "a value from outside the mask": ("if (lane < 2) __shfl_sync(3, lane, 2);", "not in the mask"),
    "shared memory that is not there": ("shared[256 + lane] = 1;", "not there"),
    "memory that is not there": ("data[0] = load_fresh((const uint32_t *)16);", "not there"),
    "a vector at an odd address": ("data[0] = ((uint4 *)(data + 1))->x;", "odd address|traps"),
    "a copy to an odd address": ("copy_async(shared + 1, data);", "multiple of 16"),
    "a polling loop without end": ("while (!load_fresh(data)) {}", "nothing gets done"),
    "a push before its target listens": (
        "push((float *)shared, (unsigned long long *)shared + 8, 1, 1.f);",
        "barrier",
    ),
    "waiting without having arrived": ("cluster_wait();", "without having arrived"),
    "a CTA outside the cluster": ("remote(shared, 2);", "does not have"),
    "division by zero": ("data[lane] = 1 / (int)data[lane];", "traps"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_caught(name: str, emulator: Emulator, tmp_path: Path) -> None:
    body, message = WRONG[name]
    with pytest.raises(EmulationError, match=message):
        for _ in range(8):
            launch(emulator, tmp_path, body)
    assert launch(emulator, tmp_path, "__syncthreads();").sum() == 0, "and the next launch works"


def test_an_end_without_waiting_for_the_producer(emulator: Emulator, tmp_path: Path) -> None:
    launch(emulator, tmp_path, "wait_for_producer();", pdl=True)
    with pytest.raises(EmulationError, match="without having waited"):
        launch(emulator, tmp_path, "if (warp) wait_for_producer();", pdl=True)


def test_a_copy_may_come_late(emulator: Emulator, tmp_path: Path) -> None:
    """Before it is waited for, a lane sees what it copies or nothing of use; after that it sees it."""
    body = """
      for (int i = 0; i < 4; i++) data[64 + i] = 5;
      __syncthreads();
      if (threadIdx.x == 0 && blockIdx.x == 0) {
        copy_async(shared, data + 64);
        commit_copies();
        data[0] = shared[0];
        asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
        data[1] = shared[0];
      }"""
    seen = [launch(emulator, tmp_path, body)[:2].tolist() for _ in range(16)]
    assert {early for early, _ in seen} == {5, -1} and {late for _, late in seen} == {5}


def test_schedules_differ_and_seeds_repeat_them(emulator: Emulator, tmp_path: Path) -> None:
    """Who is first among four warps."""
    body = "if (lane == 0) data[atomicAdd(data, 1u) + 1] = blockIdx.x * 2 + warp;"
    orders = []
    for _ in range(2):
        emulator.seed = 0
        orders.append([tuple(launch(emulator, tmp_path, body)[1:5].tolist()) for _ in range(12)])
    assert orders[0] == orders[1] and len(set(orders[0])) > 4
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders[0])


def test_large_grids(emulator: Emulator, tmp_path: Path) -> None:
    """More threads than a process may have guard pages for."""
    body = "if (threadIdx.x == 0) atomicAdd(data, 1u);"
    for _ in range(2):
        assert int(launch(emulator, tmp_path, body, threads=1024, ctas=40)[0]) == 40


def test_matrices_are_laid_out_as_ptx_says(emulator: Emulator, tmp_path: Path) -> None:
    """Four 8 x 8 matrices of 16 bits, plain and transposed; element i of matrix m is 64 m + i."""
    body = """
      for (int i = threadIdx.x; i < 128; i += 64) shared[i] = 2 * i | (2 * i + 1) << 16;
      __syncthreads();
      uint32_t plain[4], turned[4];
      load_matrices(plain, shared + lane * 4);
      load_transposed(turned, shared + lane * 4);
      if (threadIdx.x < 32 && blockIdx.x == 0)
        for (int m = 0; m < 4; m++) data[m * 32 + lane] = plain[m], data[128 + m * 32 + lane] = turned[m];"""
    plain, turned = launch(emulator, tmp_path, body).view(torch.int16).view(2, 4, 8, 8)
    expected = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    assert torch.equal(plain, expected) and torch.equal(turned, expected.mT)


def test_arguments_must_fit(emulator: Emulator, tmp_path: Path) -> None:
    launch(emulator, tmp_path, "__syncthreads();")
    kernel = EmulatedKernel(emulator, str(tmp_path / "tried.cu"), {"USE_PDL": 0}, 1024)
    with pytest.raises(EmulationError, match=r"arguments of \[8\] bytes, not \[8, 4\]"):
        kernel.launch((1, 1), 32, (0, 0), (ctypes.c_void_p, ctypes.c_int), 0, False)


def test_unknown_instructions_do_not_compile(emulator: Emulator, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="bar_arrive"):
        launch(emulator, tmp_path, 'asm volatile("bar.arrive 1, 64;");')


def test_assembler_becomes_calls() -> None:
    assert (
        assembler('"add.u32 %0, %1, 4;" : "=r"(d) : "r"(f(a, b))') == "{ ptx::add_u32((d), (f(a, b)), 4); }"
    )
    predicated = (
        r'"{\n .reg .pred p;\n setp.ne.u32 p, %1, 0;\n @p st.b32 [%0], {%1, %1};\n}" :: "l"(p), "r"(v)'
    )
    assert assembler(predicated) == (
        "{ bool register_p; ptx::setp_ne_u32(register_p, (v), 0); if (register_p) ptx::st_b32((p), (v), (v)); }"
    )
    assert assembler('"" : "+r"(x)') == "{  }"


@pytest.mark.parametrize(
    "text", ['asm("mov %0, 1" : d);', "asm(", "__shared__ int a; __shared__ int b;", "__shared__ int a[3];"]
)
def test_unknown_forms_are_refused(text: str) -> None:
    with pytest.raises(TranslationError):
        translate(text)


def test_all_sources_translate() -> None:
    for path in [*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")]:
        assert "asm" not in translate(path.read_text()).replace("assembler", "").split(), path.name


def test_every_kernel_has_an_emulated_test() -> None:
    tested = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    tested |= {"mla_absorb", "mla_attend", "mla_merge"} if "mla_attention" in tested else set()
    assert {path.stem for path in KERNELS.glob("*.cu")} <= tested
