"""Reported communication: logs and table, without effect on the run."""

from typing import Any

import pytest
import torch

from tests.callbacks.faulty import fit, weights
from tests.callbacks.modules import Paper, Written
from tests.parity.layout_modules import make_module
from tests.parity.layouts import Texts
from trainwright.callbacks.traffic.communication import CommunicationReport, report_of

# Strategy, options, ranks, and the axes with communication in a step.
LAYOUTS: dict[str, tuple[str, dict[str, Any], int, set[str]]] = {
    "ddp": ("ddp", {}, 2, {"replicate"}),
    "zero3 with copies": ("zero3", {"replicate": 2, "shard": 2}, 4, {"replicate", "shard"}),
    "pipeline x shard": ("hybrid", {"pipeline": 2, "shard": 2, "stage": 1}, 4, {"pipeline", "shard"}),
    "tensor": ("tensor", {}, 2, {"tensor"}),
}


def reported(layout: str, validate: bool = False) -> dict[str, Any]:
    strategy, options, _, _ = LAYOUTS[layout]
    printed, written = Paper(width=120), Written()
    report = CommunicationReport(every_n_steps=2, console=printed)
    more = {"val_data": Texts(8), "val_check_interval": 1, "num_sanity_val_steps": 0} if validate else {}
    trainer = fit(strategy, options, report, steps=5, logger=written, **more)
    plain = fit(strategy, options, steps=5) if layout == "ddp" else None
    return {
        "rows": written.rows,
        "latest": report.latest,
        "of_ranks": report.of_ranks,
        "printed": printed.text,
        "hooked": torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect"),
        "same": plain is None or all(torch.equal(p, weights(plain)[name]) for name, p in weights(trainer).items()),
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_by_axis(ranks, layout):
    _, _, world_size, axes = LAYOUTS[layout]
    results = ranks(reported, world_size, layout)
    first = results[0]
    logged = {step: metrics for step, metrics in first["rows"] if "communication/bytes" in metrics}
    assert sorted(logged) == [1, 3]
    for metrics in logged.values():
        parts = {name: value for name, value in metrics.items() if name.endswith("_bytes")}
        assert {name.split("/")[1] for name in parts} - {"world"} >= axes
        assert sum(parts.values()) == pytest.approx(metrics["communication/bytes"])
    assert all(result["of_ranks"] == first["of_ranks"] for result in results), "all know of all"
    assert len(first["of_ranks"]) == world_size
    assert {rank["steps"] for rank in first["of_ranks"]} == {5}
    assert "axis" in first["printed"]
    assert all(axis in first["printed"] for axis in axes)
    assert not any(result["printed"] for result in results[1:])
    assert not any(result["hooked"] for result in results)
    assert all(result["same"] for result in results)


def test_ddp_bytes_and_bytes_outside_steps(ranks):
    first = ranks(reported, 2, "ddp", True)[0]
    gradients = 4 * sum(p.numel() for p in make_module("gpt").parameters() if p.requires_grad)
    within = {(axis, kind): numbers for axis, kind, *numbers in first["of_ranks"][0]["within"]}
    calls, sent, least = within.pop(("replicate", "all_reduce"))
    # 2 (n - 1) / n of the gradients, and of two numbers that compare the weights of ranks in the first step; n = 2
    assert sent == least == 5 * gradients + 16
    assert calls >= 5
    assert within.keys() <= {("replicate", "broadcast")}, "torch's reducer agrees once on the order of its buckets"
    names = ("communication/replicate/all_reduce_bytes", "communication/bytes")
    assert first["latest"] == dict.fromkeys(names, gradients)
    besides = first["of_ranks"][0]["besides"]
    assert 0 < sum(row[3] for row in besides) < gradients
    assert "Besides steps" in first["printed"]


def test_single_process():
    report = CommunicationReport(console=(printed := Paper()))
    fit("single", {}, report, steps=2)
    assert report.of_ranks == [{"steps": 2, "within": [], "besides": []}]
    assert printed.text == ""


def test_table_of_unequal_ranks():
    ranks = [
        {"steps": 2, "within": [["pipeline", "send", 4, 4096, 4096], ["shard", "all_gather", 2, 2, 1]], "besides": []},
        {"steps": 2, "within": [["pipeline", "send", 8, 8192, 8192]], "besides": [["world", "broadcast", 1, 3072, 9]]},
    ]
    table, line = report_of(ranks)
    columns = [list(column.cells) for column in table.columns]  # type: ignore[union-attr]
    assert columns[0] == ["pipeline", "shard", "all"]
    assert columns[2] == ["3", "0.5", "3.5"]
    assert columns[3] == ["3.00 KiB", "0 B", "3.00 KiB"]
    assert columns[4] == ["4.00 KiB", "1 B", "4.00 KiB"]
    assert line == "Besides steps (validation, checkpoints, logging): 1.50 KiB a rank in all."
