"""Builds the library that is loaded before CUDA's own: `python build_stubs.py OUT.so`.

It has every function of the CUDA runtime, cuBLAS, cuBLASLt and NCCL that this Python's torch calls,
and all of the driver's.
What torch wants an answer of stands in `cudart.c` and below; everything else succeeds and does
nothing. Needs gcc and nm, and no GPU.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ANSWERS = {
    "cublasCreate_v2": "(void **handle) { *handle = (void *)16; return 0; }",
    "cublasLtCreate": "(void **handle) { *handle = (void *)16; return 0; }",
    "cublasGetVersion_v2": "(void *handle, int *version) { *version = 130100; return 0; }",
    "cublasGetPointerMode_v2": "(void *handle, int *mode) { *mode = 0; return 0; }",
    "cublasGetMathMode": "(void *handle, int *mode) { *mode = 0; return 0; }",
    "cublasLtMatmulAlgoGetHeuristic": (
        "(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int wanted, void *results,"
        " int *found) { *found = 1; return 0; }"
    ),
    "cuCtxGetCurrent": "(void **context) { *context = (void *)16; return 0; }",
    "cuDevicePrimaryCtxGetState": (
        "(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }"
    ),
    "ncclGetUniqueId": "(char *id) { for (int i = 0; i < 128; i++) id[i] = 7; return 0; }",
    "ncclGetVersion": "(int *version) { *version = 22907; return 0; }",
    **{
        name: "(void **communicator) { static long next = 0; *communicator = (void *)(next += 16);"
        " return 0; }"
        for name in (
            *("ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable"),
            "ncclCommInitAll",
        )
    },
    "ncclCommSplit": "(void *of, int a, int b, void **c) { *c = (void *)8000; return 0; }",
    "ncclCommGetAsyncError": "(void *communicator, int *error) { *error = 0; return 0; }",
    "ncclMemAlloc": "(void **p, unsigned long size) { *p = calloc(1, size); return 0; }",
    "ncclMemFree": "(void *p) { free(p); return 0; }",
}
TEXTS = ("ncclGetErrorString", "ncclGetLastError", "cudaGetErrorString", "cudaGetErrorName")
# What the runtime's headers want of a header that torch does not bring.
HOST_DEFINES = """
#define __host__
#define __device__
#define __global__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __CUDA_ARCH_HAS_FEATURE__(x) 0
"""


def wanted() -> dict[str, str]:
    """The functions that torch takes from CUDA's libraries -> the version they have there."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "lib"
    libraries = sorted([*folder.glob("libtorch_*.so"), *folder.glob("libc10_cuda.so")])
    said = subprocess.run(
        ["nm", "-D", "--undefined-only", *map(str, libraries)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pattern = r" U (p?nccl\w+|cublas\w+|cuda[A-Z]\w+|__cuda(?:LaunchKernel|GetKernel|InitModule))"
    return {name: version or "" for name, version in re.findall(pattern + r"(?:@(\S+))?", said)}


def build(out: Path) -> None:
    functions = wanted()
    if not any(name.startswith("cudaMalloc") for name in functions):
        raise SystemExit("this Python's torch is not a CUDA build")
    spec = importlib.util.find_spec("nvidia")
    assert spec is not None and spec.submodule_search_locations is not None
    folders = [Path(each) for each in spec.submodule_search_locations]
    include = next(
        path for folder in folders for path in folder.glob("cu*/include/cuda_runtime_api.h")
    ).parent
    driver = re.findall(r"\bcu[A-Z]\w+(?=\(| *$)", (include / "cuda.h").read_text(), re.MULTILINE)
    functions = dict.fromkeys(driver, "") | functions
    runtime = (HERE / "cudart.c").read_text()
    written = set(re.findall(r"^cudaError_t (\w+)\(", runtime, re.MULTILINE))
    lines = ["#include <stdlib.h>"]
    for name in sorted(functions.keys() - written):
        if name in TEXTS:
            lines.append(f'const char *{name}(void) {{ return "pretended"; }}')
        else:
            lines.append(f"int {name}{ANSWERS.get(name, '(void) { return 0; }')}")
    versions: dict[str, list[str]] = {}
    for name, version in functions.items():
        if version:
            versions.setdefault(version, []).append(name)
    script = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
        for version, names in sorted(versions.items())
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "crt").mkdir()
        (work / "crt" / "host_defines.h").write_text(HOST_DEFINES)
        (work / "rest.c").write_text("\n".join(lines) + "\n")
        (work / "versions").write_text(script)
        options = ["-shared", "-fPIC", "-O1", "-w", "-fvisibility=default"]
        includes = [f"-I{work}", f"-I{include}"]
        sources = [str(HERE / "cudart.c"), str(work / "rest.c")]
        # The driver's is the name by which torch asks for it, and takes what is loaded under it.
        links = [f"-Wl,--version-script={work / 'versions'}", "-Wl,-soname,libcuda.so.1"]
        command = ["gcc", *options, *includes, *sources, "-o", str(out), *links]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
