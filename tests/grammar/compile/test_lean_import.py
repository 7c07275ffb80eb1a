"""XGrammar is imported without torch and transformers, and compiles what it compiles with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

GRAMMAR = 'root ::= "x" [0-9]{2,4} | "é" root'
IMPORT = "import sys\nfrom rootgraft.grammar.compile.lean_import import import_xgrammar\nimport_xgrammar()\n"
COMPILE = f"""
assert not {{"torch", "transformers"}} & set(sys.modules)
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary
tokens = *(bytes([byte]) for byte in range(256)), b"<end>"
compiled = compile(GrammarSpec.ebnf({GRAMMAR!r}), Vocabulary(tokens, frozenset((256,)), (256,)))
assert not {{"torch", "transformers"}} & set(sys.modules)
sys.stdout.write(compiled.artifact.source)
"""


def said_by(program: str, folder: Path | None = None) -> str:
    """What a process of its own writes, which finds the packages of a folder before all others."""
    search = "" if folder is None else f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", search + program], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_grammars_are_those_of_the_whole_library() -> None:
    pytest.importorskip("xgrammar")
    tokens = *(bytes([byte]) for byte in range(256)), b"<end>"
    expected = compile(GrammarSpec.ebnf(GRAMMAR), Vocabulary(tokens, frozenset((256,)), (256,)))
    assert said_by(IMPORT + COMPILE) == expected.artifact.source


def write_packages(folder: Path, needed: str) -> None:
    """Write packages of these names, of which XGrammar runs some code when it is imported."""
    for name, code in {
        "torch": "ONE = 1",
        "transformers": "",
        "transformers/sub": "",
        "tvm_ffi": "try: import torch\nexcept ImportError: torch = None\n",
        "xgrammar": f"from .part import used\n{needed}\n",
        "xgrammar/part": "used = []",
    }.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)


@pytest.mark.parametrize("needed", ["import torch; assert torch.ONE + 1 == 2", "import tvm_ffi, transformers.sub"])
def test_a_version_that_needs_them_gets_them(needed: str, tmp_path: Path) -> None:
    write_packages(tmp_path, needed)
    told = "import xgrammar, xgrammar.part\nassert xgrammar.used is xgrammar.part.used\nprint(xgrammar.__file__)"
    assert said_by(IMPORT + told, tmp_path).strip() == str(tmp_path / "xgrammar" / "__init__.py")


def test_what_is_imported_already_is_used(tmp_path: Path) -> None:
    write_packages(tmp_path, "import torch")
    told = "import xgrammar\nassert xgrammar.torch is torch is sys.modules['torch'] and torch.ONE == 1"
    said_by(f"import torch\n{IMPORT}{told}", tmp_path)
