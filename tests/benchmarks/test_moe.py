import json

import pytest

from benchmarks import moe


def test_the_recipes_experts_beside_a_loop(capsys, monkeypatch):
    sizes = ["--tokens", "64", "--width", "16", "--hidden", "8", "--experts", "3", "--repeats", "1"]
    moe.main(sizes)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["dtype"], row["experts"]) for row in rows] == [("float32", 3), ("bfloat16", 3)]
    plain = moe.looped
    monkeypatch.setattr(moe, "looped", lambda *given: 1.001 * plain(*given))
    with pytest.raises(SystemExit, match="float32, 3 experts: outputs or gradients are"):
        moe.main(sizes)
