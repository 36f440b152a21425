"""The page shows the contents of files, and nothing in them is executed."""

import base64
import csv
import hashlib
import json
import re
from contextlib import nullcontext

import pytest

from tests.tools.report.browser import MISSING, browser
from tests.tools.report.parsed import Parsed
from tests.tools.report.runs import small_run, whole_run, write_records
from trainwright.core.charts.drawing import amount, curve_chart, downsampled, ticks
from trainwright.tools.report.command import run_report_command, write_report
from trainwright.tools.report.page import build_page, labels_of
from trainwright.tools.report.records import _what_of, without_repeated_steps


def test_curves_have_the_numbers_of_the_file(tmp_path):
    run = small_run(tmp_path / "run")
    page = Parsed(build_page([run]))
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    for name in ("loss", "samples_per_second"):
        shown = table_of(page, name)
        written = [(int(row["step"]), float(row[name])) for row in rows]
        assert [(int(step), float(value)) for step, value in shown] == written
    assert "last loss 3.1" in page.text
    assert "last step logged 19 of 20" in page.text


def table_of(page, name):
    """Return the rows of the table of a metric's chart."""
    names = [attributes.get("aria-label") for tag, attributes in page.tags if tag == "div"]
    labelled = [label for label in names if label and label.endswith("as a table")]
    tables = [rows[1:] for rows in page.tables if rows and rows[0][0] == "step" and len(rows[0]) == 2]
    return tables[labelled.index(f"{name} as a table")]


def test_measurements_are_shown(tmp_path):
    page = Parsed(build_page([whole_run(tmp_path / "run")]))

    by_rank = page.table("rank", "time")
    # The first window is warm-up; the second is 4 s for 2 steps.
    assert by_rank[3] == ["rank 3", "", "2 s", "125 ms", "500 ms", "1 s", "250 ms", "125 ms"]
    assert [row[0] for row in page.table("window until")] == ["step 10", "step 20"]
    memory = page.table("rank", "memory")
    assert memory[0] == ["predicted", "", "5.72 MiB", "2.86 MiB", "976.56 KiB", "1.91 MiB", "0 B", "0 B", ""]
    assert memory[3] == ["rank 2", "", "6.00 MiB", "3.00 MiB", "1.00 MiB", "2.00 MiB", "", "", "1.00 GiB"]
    assert "prediction for the largest rank, 5.72 MiB" in page.text
    assert "Predicted: 500 ms per step." in page.text

    stages = page.table("stage", "timeline")
    assert stages[0] == ["stage 0, rank 0", "", "3 s", "1 s", "25 %"]
    assert stages[3] == ["stage 1, rank 3", "", "2 s", "2 s", "50 %"]
    assert ["stage 1, rank 2", "backward", "0", "2 s", "3 s"] in page.table("stage", "action")
    assert "MFU 32.1 %" in page.text
    assert "faults, recoveries 1, 1" in page.text

    events = [(row[1], row[2], row[3]) for row in page.table("time", "step", "kind")]
    of_launcher = [("", "restarted", "launcher"), ("10", "recovered", "launcher"), ("12", "fault", "launcher")]
    assert sorted(events) == sorted([*of_launcher, ("10", "checkpoint", ""), ("15", "validation", "0")])
    assert page.table("name", "step") == [["step=10", "10", "2027-01-15 08:01:00", "4.00 KiB", "run state"]]
    grid = next(rows for rows in page.tables if rows[0][0] == "stage 0")
    assert [[cell.replace("shard", " shard") for cell in row] for row in grid] == [
        ["stage 0", "rank 0 shard 0", "rank 1 shard 1"],
        ["stage 1", "rank 2 shard 0", "rank 3 shard 1"],
    ]
    assert "trainwright fit recipe=gpt strategy=hybrid strategy.shard=-1 seed=7" in page.text
    settings = {row[0]: row[1:] for row in page.table("key", "value")}
    assert settings["seed"] == ["7", "yes"]
    assert settings["strategy.pipeline"] == ["2", "yes"]  # the group was chosen
    assert settings["optimizer.lr"] == ["0.004", ""]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("restart 1 in 2 s; restarts.log has details", "restarted"),
        ("resuming from step 4 with 2 rank(s)", "recovered"),
        ("connections broke; 1 replica(s) joined; resuming from step 4 with 2 replicas", "recovered"),
        ("the others continue; rank 1 is restarted and rejoins them", "recovered"),
        ("given up: the loss guard ended it (guard=rollback would continue)", "fault"),
        ("rank 1 failed: training cannot be resumed (before training)", "fault"),
    ],
)
def test_line_of_the_launcher_has_a_kind(line, kind):
    assert _what_of(line) == kind


def test_missing_data_is_named(tmp_path):
    page = Parsed(build_page([small_run(tmp_path / "run")]))
    for text in (
        "There is no monitor/rank_<n>.jsonl",
        "Time by part was not measured",
        "Memory was not measured",
        "No timeline was sampled",
        "There is no prediction to compare with",
        "No events were recorded: no fault, no restart, no checkpoint",
        "There are none in checkpoints/",
        "The command was not recorded",
        "MFU (the model's own operations as a share of the device's peak) was not measured",
    ):
        assert text in page.text, text
    assert "pipeline 2 x shard 2" in page.text  # from the configuration


@pytest.mark.parametrize("name", ["config.yaml", "metrics.csv"])
def test_either_file_is_enough(tmp_path, name):
    run = small_run(tmp_path / "run")
    (run / name).unlink()
    assert f"There is no {name}" in Parsed(build_page([run])).text


def test_damaged_files_are_read_partly(tmp_path):
    run = whole_run(tmp_path / "run")
    with (run / "metrics.csv").open("a") as file:
        file.write("nan,1,20\nbroken\n0.5,3,21\n0.25,")
    with (run / "monitor" / "rank_0.jsonl").open("a") as file:
        file.write('[1]\n{"kind": "step", "seconds": 3}\n{"kind": "memory", "host": "much"}\n{"kind": "bubble", "timel')
    (run / "plan.json").write_text("{")
    (run / "checkpoints" / "step=10" / "manifest.json").write_text('{"about": 3}')
    page = Parsed(build_page([run]))
    assert "last loss 0.5" in page.text
    assert "1 rows or cells of metrics.csv are damaged" in page.text
    assert "1 values of loss are NaN, infinite" in page.text
    assert "1 lines of monitor/ are damaged" in page.text


@pytest.mark.parametrize(("rows", "said"), [
    ("nan,3\ninf,4\n1,5\n", "from step 3 (2 steps)"), ("nan,3\n1,2\n2,3\n", None),
])  # fmt: skip
def test_divergence(tmp_path, capsys, rows, said):
    """Repeated steps count as newest only."""
    run = small_run(tmp_path / "run")
    (run / "metrics.csv").write_text(f"loss,step\n5,1\n4,2\n{rows}")
    text = Parsed(build_page([run])).text
    assert run_report_command(["watch", str(run), "--once"]) == 0
    for shown in (text, " ".join(capsys.readouterr().out.split())):
        assert (f"diverged loss not finite {said}" in shown) if said else "diverged" not in shown


def test_invalid_values_are_left_out(tmp_path):
    run = whole_run(tmp_path / "run")
    (run / "config.yaml").write_text("a: &a [1, 1]\nb: &b [*a, *a]\n")
    layout = {"pipeline": -1, "shard": 2}
    manifest = json.dumps({"about": {"layout": layout, "step": 1e9}})
    (run / "checkpoints" / "step=10" / "manifest.json").write_text(manifest)
    event = {"time": 1e300, "step": 1, "kind": "event", "what": "fault", "text": "in the year 1e292", "seconds": 1}
    write_records(run, 0, [event])
    page = Parsed(build_page([run]))
    assert "config.yaml cannot be read" in page.text
    assert "The layout is unknown" in page.text
    assert "1e292" not in page.text


EVIL = "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>'\"{{ 7*7 }}"


def test_texts_of_a_run_are_escaped(tmp_path):
    config = f"name: {json.dumps(EVIL)}\n? {json.dumps(EVIL)}\n: ${{oc.env:HOME}}\ndevices: 2\n"
    run = small_run(tmp_path / "run", config)
    lines = (run / "metrics.csv").read_text().replace("samples_per_second", '"' + EVIL.replace('"', '""') + '"', 1)
    (run / "metrics.csv").write_text(lines)
    event = {"time": 1.0, "step": 1, "kind": "event", "what": EVIL, "text": EVIL, "seconds": 1}
    timeline = [[0, 1, EVIL, EVIL, EVIL]]
    write_records(run, 0, [event, {"time": 1.0, "step": 1, "kind": "bubble", "timeline": timeline}])
    (run / "command.json").write_text(json.dumps({"words": ["fit", EVIL]}))
    renamed = run.rename(tmp_path / "<b onclick=x>")
    page = Parsed(build_page([renamed]))
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "b", "iframe", "object", "link", "form"}
    attributes = {name for _, found in page.tags for name in found}
    assert not {name for name in attributes if name.startswith("on") or name in ("style", "src", "xlink:href")}
    assert {found["href"][0] for tag, found in page.tags if tag == "a"} == {"#"}
    assert EVIL in page.text
    assert "${oc.env:HOME}" in page.text  # no interpolation on the machine that makes the page


def test_content_security_policy(tmp_path):
    html = build_page([small_run(tmp_path / "run")])
    page = Parsed(html)
    [policy] = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
    assert not re.search(r"https?://|url\((?!#)", html)


def test_accessibility(tmp_path):
    page = Parsed(build_page([whole_run(tmp_path / "a"), small_run(tmp_path / "b")]))
    tags = [tag for tag, _ in page.tags]
    assert all(tags.count(tag) == 1 for tag in ("h1", "main", "header", "footer", "nav"))
    assert {int(tag[1]) for tag in tags if re.fullmatch(r"h\d", tag)} == {1, 2, 3}
    ids = [found["id"] for _, found in page.tags if "id" in found]
    assert len(ids) == len(set(ids))
    links = {found["href"][1:] for tag, found in page.tags if tag == "a"}
    assert links <= set(ids)
    assert {found["aria-labelledby"] for tag, found in page.tags if tag == "section"} <= set(ids)
    for tag, found in page.tags:
        if found.get("role") in ("img", "region"):
            assert found.get("aria-label"), (tag, found)
        if tag == "svg" and found.get("role") != "img" and "x" not in found and "viewbox" not in found:
            assert found.get("aria-hidden") == "true"
    assert next(found for tag, found in page.tags if tag == "html")["lang"] == "en"


def test_runs_are_side_by_side(tmp_path):
    page = Parsed(build_page([small_run(tmp_path / "a" / "run"), small_run(tmp_path / "b" / "run")]))
    [first, *_] = page.table("step", "a/run", "b/run")
    assert first == ["0", "5", "5"]
    assert labels_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert labels_of([tmp_path / "a", tmp_path / "a"]) == ["a (1)", "a (2)"]
    assert labels_of([tmp_path / "gpt" / "2026-01-31_14-05-09"]) == ["gpt/2026-01-31_14-05-09"]


def test_size_of_a_long_run_is_bounded(tmp_path):
    run = small_run(tmp_path / "run")
    peak = 60_000
    rows = (f"{1000 if step == peak else step % 7},{step},{step}" for step in range(100_000))
    (run / "metrics.csv").write_text("loss,samples_per_second,step\n" + "\n".join(rows) + "\n")
    record = {"kind": "event", "what": "checkpoint", "text": "", "seconds": 1}
    write_records(run, 0, [{**record, "time": 1.0 + step, "step": step} for step in range(5000)])
    html = build_page([run])
    assert len(html) < 400_000
    assert "greatest 1,000," in html


def test_downsampling_keeps_peaks():
    values = [(float(x), 5.0 if x == 777 else -5.0 if x == 3111 else float(x % 3)) for x in range(5000)]
    kept = downsampled(values, 100)
    assert len(kept) <= 200
    assert kept == sorted(kept)
    assert {(777.0, 5.0), (3111.0, -5.0)} <= set(kept) <= set(values)


def test_charts_of_few_and_equal_values():
    assert curve_chart("loss", {"run": (0, [])}) is None
    chart = curve_chart("loss", {"run": (0, [(3, 2.0)])})
    assert chart.curves[0].path == "M500.0 500.0h0"
    assert ticks(0.0, 10.0, 5) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert amount(3 * 2**30, "bytes") == "3.00 GiB"


@pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed")
def test_browser_shows_the_page_without_errors(tmp_path):
    out = tmp_path / "page.html"
    out.write_text(build_page([whole_run(tmp_path / "a"), small_run(tmp_path / "b")]))
    with browser(tmp_path / "profile") as tab:
        backgrounds = []
        for scheme in ("light", "dark"):
            tab.emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            tab.emulate("setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
            tab.call("url", url=out.resolve().as_uri())
            tab.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
            assert tab.run("return document.documentElement.scrollWidth") == 390
            backgrounds.append(tab.run("return getComputedStyle(document.body).backgroundColor"))
            curves = "Array.from(document.querySelectorAll('path.curve'))"
            drawn = f"return {curves}.map(p => p.getBoundingClientRect().width)"
            assert [width > 100 for width in tab.run(drawn)] == [True, True, True, True, False]  # one value is a dot
        assert backgrounds == ["rgb(251, 251, 249)", "rgb(20, 22, 26)"]
        assert tab.call("se/log", type="browser") == []


def test_report_command(tmp_path, capsys):
    run = small_run(tmp_path / "run")
    assert run_report_command(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    assert run_report_command(["report", str(run), str(run), "--out", str(tmp_path / "both.html")]) == 0
    assert "run (2)" in (tmp_path / "both.html").read_text()
    assert not list(tmp_path.glob("**/*.partial"))


@pytest.mark.parametrize(("words", "said"), [
    ([], "required: RUN_DIR"),
    (["{tmp}/nothing"], "this run directory does not exist"),
    (["{tmp}"], "this folder contains runs but is not one itself; type for example {tmp}/run"),
    (["{tmp}/run", "--out", "{tmp}"], "this is a folder; type a file name"),
    (["{tmp}/run", "--out", "{tmp}/no/page.html"], "No such file or directory; type another --out FILE"),
    (["{tmp}/run"] * 9, "at most 8"),
    (["{tmp}/run", "--open"], "unrecognized arguments: --open; `trainwright report --help`"),
])  # fmt: skip
def test_refusals(tmp_path, capsys, words, said):
    small_run(tmp_path / "run")
    assert run_report_command(["report", *(word.format(tmp=tmp_path) for word in words)]) == 2
    assert said.format(tmp=tmp_path) in capsys.readouterr().err


def test_failed_report_does_not_fail_a_run(tmp_path, capsys):
    write_report(tmp_path / "nothing")
    assert capsys.readouterr().err.startswith("trainwright: no report was written: ")


@pytest.mark.parametrize("fails", [False, True])
def test_fit_ends_with_a_report(tmp_path, monkeypatch, capsys, fails):
    from trainwright.command import run
    from trainwright.command.schema.compose import compose

    def here(cfg, verb):
        small_run(tmp_path / "run")
        if fails:
            raise RuntimeError("why")
        return {}

    monkeypatch.setattr(run, "run_in_process", here)
    cfg = compose("digits", [f"run_dir={tmp_path / 'run'}"])
    with pytest.raises(RuntimeError, match="why") if fails else nullcontext():
        run.launch(cfg, "fit")
    assert (tmp_path / "run" / "report.html").is_file()
    assert capsys.readouterr().out.startswith("Report:        ")


def test_rank_with_several_stages_has_one_row(tmp_path):
    run = small_run(tmp_path / "run")
    timeline = [[0, 1, "forward", 0, 0], [1, 2, "forward", 0, 2], [2, 3, "backward", 0, 2], [3, 4, "optimizer", -1, -1]]
    write_records(run, 0, [{"time": 1.0, "step": 1, "kind": "bubble", "timeline": timeline}])
    page = Parsed(build_page([run]))
    assert page.table("stage", "timeline") == [["stages 0, 2, rank 0", "", "4 s", "0 ms", "0 %"]]
    done = [row[:3] for row in page.table("stage", "action")]
    assert done == [
        ["stage 0, rank 0", "forward", "0"], ["stage 2, rank 0", "forward", "0"], ["stage 2, rank 0", "backward", "0"],
        ["rank 0", "optimizer", ""],
    ]  # fmt: skip


def test_repeated_steps_count_once():
    def window(step, steps, seconds):
        return {"kind": "step", "step": step, "steps": steps, "seconds": {"forward": seconds}, "total": seconds}

    other = {"kind": "event", "step": 60, "what": "fault"}
    memory = [{"kind": "memory", "step": step, "host": step} for step in (50, 100, 50)]
    records = [window(50, 50, 5.0), memory[0], window(100, 50, 10.0), memory[1], other]
    # Rolled back to step 80, then to step 20.
    assert without_repeated_steps([*records, window(81, 1, 1.0)]) == [
        *records[:2], {**window(80, 30, 6.0), "step": 80.0}, *records[3:], window(81, 1, 1.0)
    ]  # fmt: skip
    again = without_repeated_steps([*records, window(81, 1, 1.0), window(21, 1, 1.0), memory[2]])
    assert again == [window(20, 20, 2.0), other, window(21, 1, 1.0), memory[2]]


def test_norms_are_drawn_by_block(tmp_path):
    path = small_run(tmp_path / "run")
    names = [f"norm/{what}/{block}" for what in ("grad", "param") for block in ("b.0", "b.1", "all")]
    rows = ["1,2,3,10,20,30,8,9", "1.5,2.5,3.5,10,20,40,16,19"]
    (path / "metrics.csv").write_text("\n".join([",".join([*names, "loss_scale", "step"]), *rows]) + "\n")
    text = build_page([path])
    page = Parsed(text)
    assert page.table("block", "gradient") == [
        ["b.0", "1.5", "10", "0.15"], ["b.1", "2.5", "20", "0.125"], ["all", "3.5", "40", "0.0875"]
    ]  # fmt: skip
    assert "L2 norm of gradients by step. all: 2 values, from 3 to 3.5" in text
    assert "loss_scale by step. run: 2 values, from 8 to 16" in text
    assert "norm/grad" not in page.text
