"""Examples and tools run by hand, not in tests: what they import from here must exist. Read from the sources, nothing is imported."""

import ast

import pytest

from tests.launch import ROOT

SCRIPTS = sorted(path for folder in ("examples", "tools") for path in (ROOT / folder).rglob("*.py"))


def names_of(module):
    """What `from module import ...` finds: top-level names of its file, and modules in its folder."""
    path = ROOT.joinpath(*module.split("."))
    folder, file = path, path.with_suffix(".py")
    if not file.exists():
        file = folder / "__init__.py"
    assert file.exists(), f"there is no module {module}"
    found = {child.stem for child in folder.glob("*.py")} | {child.name for child in folder.glob("*/")}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # names that __init__.py loads when they are asked for
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_from_this_package_exist(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("megatron_sr", "tests"):
            missing = {alias.name for alias in node.names} - names_of(node.module)
            assert not missing, f"{script.name}, line {node.lineno}: {node.module} has no {sorted(missing)}"
