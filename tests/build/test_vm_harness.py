"""The harness of `make test-rdma` (tests/rdma/vm), as far as it can be looked at without a virtual machine."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
VM = ROOT / "tests/rdma/vm"


@pytest.fixture
def vm() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rdma_vm", VM / "vm.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps() -> list[list[str]]:
    """The commands of the suite, in words."""
    text = (VM / "suite").read_text().replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("step ")]


def test_a_commands_exit_status_is_never_taken_for_the_machines(vm: ModuleType, capsys: pytest.CaptureFixture[str]):
    assert [vm.status_of(status) for status in (0, 1, 5, 137)] == [0, 1, 5, 137]
    assert [vm.status_of(status) for status in (vm.SKIP, vm.LATE, vm.FAILED)] == [1, 1, 1]
    assert "the command's exit status was 77" in capsys.readouterr().err


def test_without_qemu_it_says_what_is_missing(tmp_path: Path):
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, VM / "vm.py", "true"], env=env, capture_output=True, text=True)
    assert done.returncode == 77
    assert "qemu-system-x86" in done.stderr


def test_the_initial_file_system_follows_what_it_is_made_of(
    vm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(vm, "CACHE", tmp_path)
    (tmp_path / "lib/modules/6.1").mkdir(parents=True)
    kernel, files = tmp_path / "vmlinux", tmp_path / "initramfs"
    kernel.write_bytes(b"\x7fELF one")
    now = vm.initramfs_is_made_of()
    assert vm.initramfs_is_made_of() == now
    assert not vm.is_made(files, now)
    files.write_bytes(b"")
    assert not vm.is_made(files, now)  # of what nobody said
    vm.say_made(files, now)
    assert vm.is_made(files, now)
    with monkeypatch.context() as changed:
        changed.setattr(vm, "MODULES", (*vm.MODULES, "another"))
        assert not vm.is_made(files, vm.initramfs_is_made_of())
    kernel.write_bytes(b"\x7fELF another")
    assert not vm.is_made(files, vm.initramfs_is_made_of())


def test_nothing_in_the_machine_hides_the_roots_home():
    assert not re.search(r"(?<!/system)/root\b", (VM / "init").read_text())


def test_every_line_of_the_suite_runs_something():
    programs = [step for step in steps() if step[0].startswith("$TM_TEST_BUILD/")]
    assert programs
    makefile = (ROOT / "Makefile").read_text()
    built = re.search(r"^VERBS_TESTS := (.*)$", makefile, re.MULTILINE)
    assert built
    names = {program[0].removeprefix("$TM_TEST_BUILD/transfer_").removesuffix("_test") for program in programs}
    assert names == set(built[1].split())
    for words in programs:
        name = words[0].removeprefix("$TM_TEST_BUILD/transfer_").removesuffix("_test")
        source = (ROOT / f"csrc/tests/transfer/{name}_test.cpp").read_text()
        cases = re.findall(r'^TEST_CASE\("(.*)"\)', source, re.MULTILINE)
        for word in words:
            if word.startswith("-tc="):
                for wanted in word.removeprefix("-tc=").split(","):
                    assert fnmatch.filter(cases, wanted), f"{name}: no test case is called {wanted!r}"
    (python,) = [step for step in steps() if step[0] == "python"]
    files = [word for word in python if word.startswith("tests/")]
    assert len(files) > 1
    assert all((ROOT / file).exists() for file in files)
