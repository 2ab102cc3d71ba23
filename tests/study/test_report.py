"""report.html of `megatron-sr reproduce`: what it says, and how it looks at 1280 and 400 pixels."""

import importlib.util
import json
from pathlib import Path

import pytest

from megatron_sr.study import claims, drawing, results
from megatron_sr.study.report import write_report
from megatron_sr.study.reproduction_report import build, job_records
from tests.study import browser, results_of

TOOL = Path(__file__).parents[2] / "tools" / "write_reproduction.py"
_spec = importlib.util.spec_from_file_location("write_reproduction", TOOL)
write_reproduction = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(write_reproduction)


def committed():
    return results.load(write_reproduction.DOCS / "reproduction.json")


def records_of(run):
    parity = {"syncs": 3, "tensors": 150, "mismatched_tensors": 0}
    return [
        {"iteration": i, "exact_reward": reward, "sync_seconds": 0.03, "sync_bytes": 820_000, "completion_tokens": 4.0, "parity": parity}
        for i, reward in zip(run["iteration"], run["exact_reward"])
    ]  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report with every kind of section, from the committed numbers, and with a job's records beside it."""
    out = tmp_path_factory.mktemp("report")
    made = committed()
    made["experiments"] = {"convergence": made["experiments"]["convergence"], "headline": results_of.convergence()}
    for number, run in enumerate(made["experiments"]["headline"]["panels"][0]["arms"][0]["runs"]):
        lines = "".join(json.dumps(record) + "\n" for record in records_of(run))
        (out / f"headline-{number}.metrics.jsonl").write_text(lines)
    return write_report(out, build(made, job_records(out, made)))


@pytest.mark.parametrize(("width", "height"), [(1280, 6000), (400, 12000)])
def test_nothing_sticks_out_and_every_picture_shows(page, width, height, tmp_path):
    from PIL import Image

    shot = tmp_path / "shot.png"
    found = browser.look(page, width, height, shot)
    assert found["width"] == width
    assert found["out"] == []
    assert found["page"] <= width
    assert (found["broken"], found["external"]) == (0, [])
    assert found["images"] >= 5
    with Image.open(shot) as image:
        assert image.size == (width, height)
        assert len(image.convert("RGB").getcolors(1 << 24)) > 500  # text and curves, not a blank page
    if width == 400:
        assert found["scrolling"] > 0  # wide tables scroll in their own containers


def test_the_probe_sees_what_sticks_out(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><body style='margin:0'><p style='width:500px'>wide</p></body>")
    assert browser.look(page, 400, 300, tmp_path / "shot.png")["out"]


def test_one_file_with_pictures_beside_it(page):
    html = page.read_text()
    assert "http" not in html
    assert html.count("data:image/svg+xml;base64,") == 2 * len(list(page.parent.glob("*.png")))  # wide and narrow
    for name in ("sticking", "magnitudes", "convergence-reward", "headline-reward", "syncs", "response-length"):
        assert (page.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "0 differ from the trainer&#39;s bits" in html
    assert "a &lt; b &amp; c" in html
    assert "2³²" in html
    assert "2^32" not in html


def test_what_was_not_run_is_named_and_not_judged():
    report = build(results_of.whole(convergence=results_of.convergence()), {})
    titles = {section.title: section for section in report.sections}
    assert titles["Drift"].left_out.startswith("not run; megatron-sr reproduce drift")
    assert titles["Weight sticking"].left_out
    assert titles["Convergence"].left_out is None
    verdicts = {claim.paper: claim for claim in claims.claims(results_of.whole(convergence=results_of.convergence()))}
    drift = verdicts["Raising the learning rate instead costs drift from the base"]
    assert (drift.here, drift.verdict, drift.meaning) == ("not run", "not run", "")


def test_a_run_without_a_headline_claims_none(tmp_path):
    report = build(results_of.whole(), {})
    assert (report.failure, report.success, report.keys) == (None, None, [])
    assert 'class="verdict' not in write_report(tmp_path, report).read_text()
    failed = {**results_of.whole(convergence=results_of.convergence()), "failure": "convergence: too slow"}
    assert build(failed, {}).failure == "The headline failed. convergence: too slow."


def test_verdicts_follow_the_numbers():
    def verdicts(**slopes):
        found = claims.claims(results_of.whole(convergence=results_of.convergence(**slopes)))
        return {c.paper: c for c in found}

    lags, keeps = (
        "BF16 rounded to nearest converges slower than FP16",
        "BF16 rounded stochastically converges as fast as FP16",
    )
    found = verdicts()
    assert (found[lags].verdict, found[keeps].verdict) == ("holds", "holds")
    assert "at least 2.08 x" in found[lags].here  # 20 iterations, where they ended, over FP16's 9.84, 9.38 and 9.68
    assert "in 3 of 3 pairs the target was never reached" in found[lags].here
    found = verdicts(nearest=(3e-4, 3e-4, 3.1e-4), stochastic=(2e-4, 2e-4, 2.1e-4))
    assert (found[lags].verdict, found[keeps].verdict) == ("does not show", "does not show")
    assert found[lags].meaning.startswith("The gap that stochastic rounding is meant to close is smaller")


def test_rewards_are_gains_over_each_run_s_start():
    """Bases start 0.1 apart; that spread must not show as an error of the arm."""
    from megatron_sr.study.result_figures import mean_curve, value

    [panel] = results_of.convergence()["panels"]
    stat = value(panel["arms"][1], "final_reward")
    assert stat["mean"] == pytest.approx(20 * 3.1e-4)
    assert stat["sem"] == pytest.approx(20 * 1e-5 / 3**0.5)
    x, mean, sem = mean_curve(panel["arms"][1]["runs"], "exact_reward", gain=True)
    assert (x[0], x[-1], mean[-1], sem[-1]) == (0, 20, pytest.approx(stat["mean"]), pytest.approx(stat["sem"]))


def test_records_belong_to_the_run_with_their_rewards(tmp_path):
    made = results_of.whole(headline=results_of.convergence())
    run = made["experiments"]["headline"]["panels"][0]["arms"][1]["runs"][0]
    for name, records in (("mine", records_of(run)), ("other", records_of({**run, "exact_reward": [0.1] * 11}))):
        (tmp_path / f"{name}.metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert job_records(tmp_path, made) == {"BF16 stochastic": [records_of(run)]}


def test_every_picture_of_the_committed_results_draws_in_both_sizes():
    pictures = [picture for section in build(committed(), {}).sections for picture in section.pictures]
    assert len({picture.name for picture in pictures}) == len(pictures) >= 8
    for picture in pictures:
        assert len(picture.alt) > 40
        for size in (drawing.WIDE, drawing.NARROW):
            figure = picture.draw(size)
            assert figure.get_figwidth() == size.width
            assert all(ax.lines or ax.patches or ax.containers for ax in figure.axes)


def test_pictures_follow_the_colour_scheme():
    files = drawing.render(lambda size: drawing.axes(size, "T", "x", "y")[0])
    for svg in (files.wide.decode(), files.narrow.decode()):
        assert "prefers-color-scheme: dark" in svg
        assert all(light not in svg.split("</style>", 1)[1] for light, _ in drawing.THEMED)
        assert "system-ui" in svg


def test_the_document_is_what_the_committed_results_say():
    difference = write_reproduction.difference(write_reproduction.DOCS)
    assert difference is None, f"run python tools/write_reproduction.py:\n{difference}"


def test_check_fails_when_document_and_results_differ(tmp_path, capsys):
    made = results_of.whole(convergence=results_of.convergence())
    results.save(made, tmp_path / "reproduction.json")
    text = write_reproduction.document(tmp_path)
    (tmp_path / "reproduction.md").write_text(text)
    assert write_reproduction.main(["--check"], tmp_path) == 0
    made["seconds"] += 3600
    results.save(made, tmp_path / "reproduction.json")
    assert write_reproduction.main(["--check"], tmp_path) == 1
    assert "run tools/write_reproduction.py" in capsys.readouterr().out
    (tmp_path / "reproduction.json").unlink()
    assert write_reproduction.main(["--check"], tmp_path) == 2
