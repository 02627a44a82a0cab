"""Every code block of README.md and docs/ runs. A file's python blocks are one program, in their order; lines of shell
blocks are `make` targets that exist or `torch-mooncake` commands that know their options; no other kind is allowed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
NOT_CODE = ("", "text")  # diagrams, output
MAKE_TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(path: Path, language: str) -> list[tuple[int, str]]:
    """(first line's number, text) of the blocks in one language."""
    text = path.read_text()
    found = FENCE.finditer(text)
    return [(text[: match.start(2)].count("\n") + 1, match[2]) for match in found if match[1].strip() == language]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [path for path in FILES if blocks(path, "python")], ids=name)
def test_python_blocks_run(path, tmp_path):
    parts: list[str] = []
    line = 1
    for start, text in blocks(path, "python"):  # blank lines keep the numbers of tracebacks those of the document
        parts.append("\n" * (start - line) + text)
        line = start + text.count("\n")
    program = tmp_path / f"{path.stem}.py"
    program.write_text("".join(parts))
    env = os.environ | {
        "TM_RUNTIME_DIR": str(tmp_path / "tm"),
        "TM_POOL": "docs",
        "TM_LINGER_S": "0",
        "TM_MEMORY": "256MiB",
    }
    done = subprocess.run([sys.executable, str(program)], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=name)
def test_shell_blocks_name_what_exists(path):
    for start, text in blocks(path, "sh"):
        for line in text.splitlines():
            command = line.split("#")[0].split()
            if not command:
                continue
            where = f"{name(path)}:{start}: {line}"
            if command[0] == "make":
                assert next(word for word in command[1:] if "=" not in word) in MAKE_TARGETS, where
            elif command[0] == "torch-mooncake":
                tool = Path(sys.executable).with_name("torch-mooncake")
                words = 2 if command[1:2] == ["weights"] else 1  # it has actions
                subcommand = [word for word in command[1 : 1 + words] if not word.startswith("-")]
                done = subprocess.run([tool, *subcommand, "--help"], capture_output=True, text=True)
                assert done.returncode == 0, where
                for option in re.findall(r"--[a-z][a-z-]*", line.split("#")[0]):
                    assert option in done.stdout, where
            else:
                assert line.split("#")[0].strip() == "pip install --no-build-isolation .", where


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_other_kind_of_code(path):
    kinds = {match[1].strip() for match in FENCE.finditer(path.read_text())}
    assert kinds <= {"python", "sh", *NOT_CODE}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_links_and_files_exist(path):
    text = FENCE.sub("", path.read_text())
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{name(path)} links to {target}"
