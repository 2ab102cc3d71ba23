"""Verifiable rewards for mathematics, by the math-verify library."""

from __future__ import annotations


def require_math_verify() -> None:
    """Raise ImportError with the way out when math-verify is missing."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"rewards for jsonl tasks need math-verify ({error}); install it with: pip install 'megatron-sr[math]'"
        ) from error


def math_reward(completion: str, answer: str) -> float:
    """1.0 if the completion's last mathematical answer equals `answer`, else 0.0 (also when nothing can be parsed)."""
    from math_verify import parse, verify

    gold = parse(f"\\boxed{{{answer}}}")
    found = parse(completion)
    return float(bool(gold) and bool(found) and verify(gold, found))
