"""What programs, headers and logs say, read right."""

from pathlib import Path

import pytest

from hvdkit.errors import BuildError, UsageError
from hvdkit.horovod_build import diagnose, frameworks, mpi, toolchain
from hvdkit.horovod_build.process import Answer, ask
from hvdkit.horovod_build.progress import PlainProgress, percent_of

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to", "openmpi 5.0.11"),
        ("mpirun (Open MPI) 4.1.4\n", "openmpi 4.1.4"),
        ("mpirun (OpenRTE) 4.0.3\n", "openmpi 4.0.3"),
        ("mpicxx: Open MPI 5.0.11 (Language: C++)\n", "openmpi 5.0.11"),
        ("HYDRA build details:\n    Version:                                 4.3.2\n    CC: cc\n", "mpich 4.3.2"),
        ("mpicxx for MPICH version 4.3.2\nUsing built-in specs.\n", "mpich 4.3.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701 (id: 179630a)\n", "intelmpi 2021.13"),
        ("mpigxx for the Intel(R) MPI Library 2021.13 for Linux*\n", "intelmpi 2021.13"),
        ("c++: error: unrecognized command-line option '--showme:version'", "unknown"),
        ("", "unknown"),
    ],
)
def test_banner(text: str, expected: str) -> None:
    assert str(mpi.parse_banner(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("3.25.1", (3, 25, 1)), ("4.0.0-rc2", (4, 0, 0)), ("84.2.1.post1", (84, 2, 1)), ("x", ())]
)
def test_version_tuple(text: str, expected: tuple[int, ...]) -> None:
    assert toolchain.version_tuple(text) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[  1%] Building CXX object gloo/algorithm.cc.o", 1),
        ("  [ 57%] Building CXX object x.cc.o", 57),
        ("[100%] Built target pytorch", 100),
        ("gcc -O3 [57%]", None),
        ("[Errno 2] No such file", None),
    ],
)
def test_percent(line: str, expected: int | None) -> None:
    assert percent_of(line) == expected


def test_plain_progress_writes_one_line_every_ten_percent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = PlainProgress()
    progress.phase("compiling")
    for done in [1, 3, 9, 10, 11, 19, 25, 25, 99, 100]:
        progress.percent(done)
    lines = [line.split("] ")[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["compiling"] + [f"compiling: {n} %" for n in (10, 25, 99, 100)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("torch", ("torch",)), ("tensorflow,torch", ("torch", "tensorflow")), (" pytorch , TF ", ("torch", "tensorflow"))],
)
def test_with(text: str, expected: tuple[str, ...]) -> None:
    assert frameworks.parse_names(text) == expected


@pytest.mark.parametrize("text", ["mxnet", "torch,jax", "", ","])
def test_with_names_what_it_accepts(text: str) -> None:
    with pytest.raises(UsageError, match="accepted: torch, tensorflow"):
        frameworks.parse_names(text)


@pytest.mark.parametrize(("guard", "expected"), [("201703L", 17), ("202002L", 20), ("", 14)])
def test_a1_the_standard_comes_from_torchs_own_header(tmp_path: Path, guard: str, expected: int) -> None:
    header = tmp_path / "torch" / "csrc" / "api" / "include" / "torch" / "all.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#pragma once\n#if !defined(_MSC_VER) && __cplusplus < {guard}\n" if guard else "#pragma once\n")
    assert frameworks.torch_standard(tmp_path) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-I/x", "-D_GLIBCXX_USE_CXX11_ABI=1", "--std=c++17"], 17),
        (["-std=c++14"], 14),
        (["-std=gnu++20"], 20),
        (["--std=c++2a"], 20),
        (["-I/x"], 14),
    ],
)
def test_a2_the_standard_comes_from_tensorflows_own_flags(flags: list[str], expected: int) -> None:
    assert frameworks.flags_standard(flags) == expected


def test_xla_needs_both_headers(tmp_path: Path) -> None:
    for name in ("highwayhash/arch_specific.h", "tensorflow/compiler/xla/client/xla_builder.h"):
        assert not frameworks.has_xla_headers(tmp_path)
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    assert frameworks.has_xla_headers(tmp_path)


def test_a_framework_that_cannot_be_imported_shows_its_error() -> None:
    said = "Traceback …\nImportError: libcudart.so.12: cannot open shared object file\n"
    with pytest.raises(BuildError, match="importing torch fails: ImportError: libcudart"):
        frameworks.read_answer("torch", Answer(1, said))


def test_ask_survives_what_cannot_run() -> None:
    assert ask(["/nonexistent/tool"]).code == 127
    slow = ask(["sleep", "30"], timeout_s=0.2)
    assert slow.code == 124
    assert "stopped after 0.2 s" in slow.output


LOGS = {
    "gcc": (
        [
            "[ 71%] Building CXX object horovod/torch/adapter_v2.cc.o",
            "/x/a.h:10:5: warning: unused variable",
            "In file included from /x/mpi_ops_v2.cc:20:",
            "/x/all.h:5:2: error: #error C++17 or later compatible compiler is required to use PyTorch.",
            "    5 | #error C++17 or later compatible compiler is required to use PyTorch.",
            "      |  ^~~~~",
            "/x/string_view.h:3:1: error: 'string_view' in namespace 'std' does not name a type",
            "make[2]: *** [horovod/torch/adapter_v2.cc.o] Error 1",
            "subprocess.CalledProcessError: Command '['cmake', '--build', '.']' returned non-zero exit status 2.",
        ],
        "error: #error C++17",
        3,
    ),
    "killed": (
        [
            "[ 80%] Building CXX object a.cc.o",
            "c++: fatal error: Killed signal terminated program cc1plus",
            "compilation terminated.",
            "make: *** [all] Error 2",
        ],
        "Killed signal",
        1,
    ),
    "link": (
        ["[ 99%] Linking CXX shared library x.so", "/usr/bin/ld: cannot find -lmpi: No such file or directory",
         "collect2: error: ld returned 1 exit status"],
        "cannot find -lmpi",
        1,
    ),
    "disk": (["[ 9%] x", "/tmp/cc1.s: fatal error: No space left on device", "make: *** 2"], "No space left", 1),
    "python": (
        ["running bdist_wheel", "Traceback (most recent call last):", '  File "setup.py", line 3', "    import x",
         "ModuleNotFoundError: No module named 'x'"],
        "No module named 'x'",
        4,
    ),
    "nothing": (["one", "", "two"], "two", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_first_error(name: str) -> None:
    lines, expected, length = LOGS[name]
    error = diagnose.first_error(lines)
    assert expected in "\n".join(error)
    assert len(error) == length
    assert not any("CalledProcessError" in line or "make" in line for line in error)


def test_hints() -> None:
    assert "memory" in diagnose.hint(["c++: fatal error: Killed signal terminated program cc1plus"])
    assert "disk" in diagnose.hint(["x: No space left on device"])
    assert diagnose.hint(["something new"]) == ""


@pytest.mark.parametrize("log", ["build_torch_needs_newer_cxx.log", "build_cmake4_refuses_gloo.log"])
def test_first_error_of_a_whole_log(log: str) -> None:
    lines = (DATA / log).read_text().splitlines()
    error = diagnose.first_error(lines)
    wanted = {"build_torch": "#error C++17 or later", "build_cmake": "Compatibility with CMake < 3.5 has been removed"}
    assert wanted[log[:11]] in "\n".join(error)
    assert len(error) <= 13
    assert diagnose.hint(error)
    assert lines.index(error[0]) < len(lines) - 20, "the test needs a log whose end says something else"
