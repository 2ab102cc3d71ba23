"""Flags of tasks, rewards and evaluation, their checks, and the tasks that they describe."""

from __future__ import annotations

import argparse
import json
import math
import os


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the job's parser."""
    from megatron_sr.rl.prompts import TEMPLATES

    g = parser.add_argument_group("problems and rewards (jsonl, parquet and reasoning-gym tasks)")
    g.add_argument(
        "--prompt-template",
        default="boxed",
        metavar="NAME|@FILE",
        help=f"what is said around a problem: {', '.join(TEMPLATES)}, or a file with {{problem}} in it (default: boxed)",
    )
    g.add_argument(
        "--system-prompt", default=None, metavar="TEXT", help="system message, for chat templates that take one"
    )
    g.add_argument(
        "--problem-field", default="problem", metavar="FIELD", help="field or column, such as prompt.0.content"
    )
    g.add_argument("--answer-field", default="answer", metavar="FIELD", help="such as reward_model.ground_truth")
    g.add_argument(
        "--task-settings",
        default="{}",
        metavar="JSON",
        help="settings of a reasoning-gym dataset, such as '{\"min_terms\": 2}'",
    )
    g.add_argument(
        "--reward-workers",
        type=int,
        default=None,
        metavar="N",
        help="processes of each rank that compare answers (default: the machine's cores / ranks, 1 to 8)",
    )
    g.add_argument(
        "--reward-time-limit",
        type=float,
        default=5.0,
        metavar="S",
        help="CPU seconds for comparing one answer; beyond, no reward",
    )

    g = parser.add_argument_group("evaluation by sampling")
    g.add_argument(
        "--eval-task",
        default=None,
        metavar="TASK",
        help="as --task; its mean reward is measured: mean@N (default: none)",
    )
    g.add_argument(
        "--eval-prompt-template",
        default=None,
        metavar="NAME|@FILE",
        help="for its problems (default: that of --prompt-template)",
    )
    g.add_argument("--eval-problem-field", default="problem", metavar="FIELD")
    g.add_argument("--eval-answer-field", default="answer", metavar="FIELD")
    g.add_argument("--eval-samples", type=int, default=32, metavar="N", help="sampled answers to each problem")
    g.add_argument("--eval-temperature", type=float, default=1.0, metavar="T")
    g.add_argument(
        "--eval-interval",
        type=int,
        default=10,
        metavar="N",
        help="iterations between; also at the start and the end",
    )


def check(args: argparse.Namespace) -> None:
    """Raise ValueError or FileNotFoundError, naming the flag and the way out, for what cannot work."""
    for name, low in (("eval_samples", 1), ("eval_interval", 1), ("reward_workers", 1)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {low}")
    for name in ("reward_time_limit", "eval_temperature"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{name.replace('_', '-')} {value} must be a finite number above 0")
    if args.eval_task and args.rollout_engine == "ray" and args.max_staleness:
        raise ValueError(
            "--eval-task with --rollout-engine ray and --max-staleness: rollouts and evaluation would reach the one driver in another "
            "order on each rank; leave one of them out"
        )
    options_of(args)
    options_of(args, evaluation=True)


def options_of(args: argparse.Namespace, evaluation: bool = False):
    """The `TaskOptions` of parsed flags, of --task or of --eval-task. Raises ValueError and FileNotFoundError as `Prompt` does."""
    from megatron_sr.rl.prompts import Prompt
    from megatron_sr.rl.tasks import TaskOptions

    template, fields = args.prompt_template, (args.problem_field, args.answer_field)
    if evaluation:
        template, fields = args.eval_prompt_template or template, (args.eval_problem_field, args.eval_answer_field)
    try:
        settings = json.loads(args.task_settings)
    except json.JSONDecodeError as error:
        raise ValueError(f"--task-settings {args.task_settings}: not valid JSON ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(f'--task-settings {args.task_settings}: must be a JSON object such as {{"min_terms": 2}}')
    workers = args.reward_workers
    if workers is None:
        workers = max(1, min(8, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    return TaskOptions(
        Prompt(template, args.system_prompt),
        *fields,
        workers,
        args.reward_time_limit,
        settings,
    )


def build_tasks(args: argparse.Namespace, tokenizer, announce: bool):
    """(the training task, the evaluation task or None), without problems that are too long; `announce` says how many those are."""
    from megatron_sr.rl.tasks import task_from_spec

    task = task_from_spec(args.task, tokenizer, options_of(args))
    eval_task = task_from_spec(args.eval_task, tokenizer, options_of(args, evaluation=True)) if args.eval_task else None
    for each in filter(None, (task, eval_task)):
        each.drop_long_prompts(args.max_prompt_tokens, announce)
    return task, eval_task
