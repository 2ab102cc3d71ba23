"""Put the `--param-rounding` patch into a Megatron-LM source tree, or take it out again.

    python tools/patch.py check                        # the Megatron-LM that this Python imports
    python tools/patch.py apply --target ~/Megatron-LM # a checkout, or any folder that holds `megatron/`
    python tools/patch.py revert --target ~/Megatron-LM

The patch (patches/megatron-lm/) only adds calls into megatron_sr, which must be installed where that tree is used. All of it is
applied or none; reverting gives back the very bytes. Needs git, but the target need not be a repository.
Exit codes: 0 done or nothing to do, 1 the patch does not fit this tree or only part of it is there, 2 bad input.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

RELEASES = Path(__file__).resolve().parents[1] / "patches" / "megatron-lm"
VERSION_FILE = "megatron/core/package_info.py"


def find_target(given: Path | None) -> Path:
    """The folder that holds `megatron/`: the given one, or where this Python finds Megatron-LM's training package.

    Raises FileNotFoundError if it holds no Megatron-LM.
    """
    if given is not None:
        folders = [given]
    else:
        spec = importlib.util.find_spec("megatron")
        folders = [Path(found).parent for found in (spec.submodule_search_locations if spec else [])]
    for folder in folders:
        if (folder / "megatron/training/arguments.py").is_file() and (folder / VERSION_FILE).is_file():
            return folder.resolve()
    if given is None:
        raise FileNotFoundError(
            "this Python finds no Megatron-LM (megatron.core and megatron.training); name one with --target DIR"
        )
    raise FileNotFoundError(
        f"--target {given}: no megatron/training/arguments.py and {VERSION_FILE} there; "
        "give a Megatron-LM checkout, or the site-packages that holds megatron/"
    )


def find_patch(target: Path, release: str | None) -> Path:
    """The patch of this tree's release, such as core_v0.19.x, or of the given one.

    Raises LookupError if there is none, and ValueError if the tree does not tell its release.
    """
    known = sorted(folder.name for folder in RELEASES.iterdir() if folder.is_dir())
    if release is None:
        text = (target / VERSION_FILE).read_text()
        numbers = [re.search(rf"^{name} *= *(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR")]
        if None in numbers:
            raise ValueError(
                f"{target / VERSION_FILE} has no MAJOR and MINOR numbers; name the patch with --release {known[0]}"
            )
        release = f"core_v{numbers[0][1]}.{numbers[1][1]}.x"
    if release not in known:
        raise LookupError(
            f"there is no patch for {release}, only for {', '.join(known)}; try a near one with --release {known[-1]} "
            "(check changes nothing), or use the plugin: import megatron_sr.megatron.plugin"
        )
    return RELEASES / release / "param_rounding.patch"


def files_of(patch: Path) -> dict[str, list[str]]:
    """The added lines by file that the patch changes."""
    added: dict[str, list[str]] = {}
    for line in patch.read_text().splitlines():
        if line.startswith("+++ "):
            lines = added.setdefault(line.removeprefix("+++ b/"), [])
        elif line.startswith("+"):
            lines.append(line[1:])
    return added


def states(target: Path, patch: Path) -> dict[str, str]:
    """By file: original (the patch fits), patched, partly (some of its lines are there) or different (it does not fit)."""
    found = {}
    for name, added in files_of(patch).items():
        path = target / name
        lines = path.read_text().splitlines() if path.is_file() else []
        if _git_apply(target, patch, "--check", "--include", name).returncode == 0:
            found[name] = "original"
        elif _git_apply(target, patch, "--reverse", "--check", "--include", name).returncode == 0:
            found[name] = "patched"
        else:
            found[name] = "partly" if set(added) & set(lines) else "different"
    return found


def change(target: Path, patch: Path, reverse: bool) -> None:
    """Apply the patch, or take it out. Raises RuntimeError with git's words if that fails; then nothing has changed."""
    done = _git_apply(target, patch, *(["--reverse"] if reverse else []))
    if done.returncode:
        raise RuntimeError(f"git apply failed on {target}: {done.stderr.strip()}")


def _git_apply(target: Path, patch: Path, *options: str) -> subprocess.CompletedProcess:
    # Inside some other repository (site-packages of a project's .venv, say) git would take names as relative to its root and pass
    # over what it ignores: let it see no repository but the target itself.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(target.parent), "LC_ALL": "C"}
    command = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", *options, str(patch)]
    return subprocess.run(command, cwd=target, env=environment, capture_output=True, text=True)


def run(action: str, target: Path, patch: Path) -> int:
    """Do it and say what was done; returns the exit code."""
    found = states(target, patch)
    kinds, where = set(found.values()), f"{patch.parent.name} patch, {target}"
    if kinds == {"patched"}:
        if action != "revert":
            print(f"{where}: applied" + (" already, nothing to do" if action == "apply" else ""))
            return 0
        change(target, patch, reverse=True)
        print(f"{where}: reverted; the {len(found)} files are as they were")
        return 0
    if kinds == {"original"}:
        if action != "apply":
            print(f"{where}: not applied" + (", nothing to revert" if action == "revert" else "; it fits"))
            return 0
        change(target, patch, reverse=False)
        print(f"{where}: applied to {', '.join(found)}")
        if importlib.util.find_spec("megatron_sr") is None:
            print(
                "megatron_sr is not installed in this Python; the patched tree needs it: pip install megatron-sr",
                file=sys.stderr,
            )
        return 0
    listed = "".join(f"\n  {name}: {_WORDS[state]}" for name, state in found.items())
    if kinds & {"patched", "partly"}:
        print(
            f"{where}: partially applied; nothing was changed{listed}\nput the original files back "
            "(git checkout -- FILES, or pip install --force-reinstall --no-deps megatron-core), then apply again",
            file=sys.stderr,
        )
    else:
        print(
            f"{where}: does not fit; nothing was changed{listed}\nthe added lines are in {patch.relative_to(RELEASES.parents[1])}: "
            "put them in by hand, or use the plugin: import megatron_sr.megatron.plugin",
            file=sys.stderr,
        )
    return 1


_WORDS = {
    "original": "not patched",
    "patched": "patched",
    "partly": "has some of the patch's lines, not all",
    "different": "differs from the release around the patched lines",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("check", "apply", "revert"))
    parser.add_argument(
        "--target", type=Path, metavar="DIR", help="folder that holds megatron/ (default: the installed one)"
    )
    parser.add_argument(
        "--release", metavar="NAME", help="the patch to use (default: by the tree's version), e.g. core_v0.19.x"
    )
    args = parser.parse_args(argv)
    try:
        target = find_target(args.target)
        return run(args.action, target, find_patch(target, args.release))
    except (FileNotFoundError, LookupError, ValueError) as error:
        missing_git = isinstance(error, FileNotFoundError) and error.filename == "git"
        print(f"patch.py: error: {'git is not on the PATH; install it' if missing_git else error}", file=sys.stderr)
        return 2
    except (RuntimeError, PermissionError) as error:
        print(f"patch.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
