"""Values of environment variables never appear in files or on the terminal."""

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from tests.checkpoint.foreign.test_malicious import Net, changed, forge, good_files, loader, trainer
from tests.command.project import run_command, write_project
from trainwright.checkpoint.foreign.export import export
from trainwright.checkpoint.read.run_state import RunState
from trainwright.core.config.masking import masked, masked_word
from trainwright.core.config.missing import resolved
from trainwright.core.config.references import literal, plain_values, settled, variables_of
from trainwright.core.run.run_directory import read_config, write_config_file
from trainwright.launch.engines.engines import variable_problems

SECRET = "hf_Zq7secret0815"
NAME = "TRAINWRIGHT_TEST_SECRET"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, SECRET)


def files_with(text: str, folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


CHECKED = f"""
import hashlib

from my_module import MyModule


class Private(MyModule):
    def __init__(self, api_token, dsn, headers, **rest):
        super().__init__(**rest)
        self.save_hyperparameters("api_token", "headers")
        for text in (api_token, dsn.removeprefix("db://"), headers["Authorization"].removeprefix("Bearer ")):
            assert hashlib.sha256(text.encode()).hexdigest() == "{hashlib.sha256(SECRET.encode()).hexdigest()}"
        print("every value has arrived", flush=True)
"""
GIVEN = (
    "module._target_=private.Private",
    f"+module.api_token=${{oc.env:{NAME}}}",
    f"+module.dsn='db://${{oc.env:{NAME}}}'",
    "+module.headers={Authorization: 'Bearer ${module.api_token}'}",
)


def test_a_run_writes_references_and_has_values(tmp_path: Path) -> None:
    """Three keys hold a secret in three ways; every file of the run directory and the whole output are searched."""
    conf = write_project(tmp_path)
    (tmp_path / "private.py").write_text(CHECKED, encoding="utf-8")
    words = ("recipe=mine", "devices=2", "strategy=ddp", "checkpoint=none", "run_dir=run", "max_steps=2", *GIVEN)
    done = run_command("fit", *words, "--config-dir", str(conf), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "every value has arrived" in done.stdout
    assert SECRET not in done.stdout
    run = tmp_path / "run"
    assert files_with(SECRET, run) == []
    module = OmegaConf.to_container(OmegaConf.load(run / "config.yaml").module)
    reference = f"${{oc.env:{NAME}}}"
    assert module["api_token"] == reference
    assert module["dsn"] == f"db://{reference}"
    assert read_config(run).module.headers.Authorization == f"Bearer {SECRET}"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert reference in page


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfg = OmegaConf.create({"module": {"token": f"${{oc.env:{NAME}}}"}})
    write_config_file(cfg, tmp_path)
    monkeypatch.delenv(NAME)
    with pytest.raises(ValueError, match=NAME):
        resolved(read_config(tmp_path))


def test_literal_secrets_are_masked(tmp_path: Path) -> None:
    """Ten secrets are typed; the configuration that is printed and the page of the run show none of them."""
    conf = write_project(tmp_path)
    classes = (tmp_path / "my_module.py").read_text(encoding="utf-8")
    taking_more = classes.replace("sleep=0.0):", "sleep=0.0, **more):").replace(
        "batch_size=4):", "batch_size=4, **more):"
    )
    (tmp_path / "my_module.py").write_text(taking_more, encoding="utf-8")
    words = [
        "+module.api_key=SHOWN_1",
        "+module.db.password=SHOWN_2",
        "+module.headers={Authorization: SHOWN_3, X-Other: SHOWN_4}",
        "+module.env={A: SHOWN_5}",
        "+module.remote='https://me:SHOWN_6@host/path'",
        "+data.options={secret: SHOWN_7, list: [{authToken: SHOWN_8}]}",
        "+data.hf_token=SHOWN_9",
        "+data.env.B=SHOWN_10",
    ]
    printed = run_command("fit", "recipe=mine", *words, "--print-config", "--config-dir", str(conf), cwd=tmp_path)
    assert printed.returncode == 0, printed.stdout
    assert "SHOWN" not in printed.stdout
    assert "hidden: 8" in printed.stdout
    run = tmp_path / "run"
    run.mkdir()
    nested = OmegaConf.from_dotlist([word.lstrip("+") for word in words])
    (run / "config.yaml").write_text(OmegaConf.to_yaml(nested), encoding="utf-8")
    (run / "command.json").write_text(json.dumps({"words": ["fit", *words]}), encoding="utf-8")
    told = run_command("report", "run", cwd=tmp_path)
    assert told.returncode == 0, told.stdout
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "module.api_key" in page
    assert "SHOWN" not in page


def test_keys_of_secrets() -> None:
    """Thirty keys that name a secret and twenty that only look so, each as a key and as a word of the command."""
    secret = (
        "token hf_token HF_TOKEN wandbToken access_token private_token apiToken authToken password db_password passwd "
        "pwd passphrase secret client_secret secrets api_key apiKey APIKey apikey aws_access_key_id private_key "
        "encryption_key authorization Authorization auth bearer cookie credentials signing_key"
    )
    for key in shlex.split(secret):
        assert masked({"a": {key: "text"}}) == {"a": {key: "***"}}, key
        assert masked({key: {"b": ["text"]}}) == {key: {"b": ["***"]}}, key
        assert masked_word(f"a.{key}=text") == f"a.{key}=***"
        assert masked_word(f"a={{{key}: text}}") == "a=***"
        assert masked({key: f"${{oc.env:{NAME}}}"}) == {key: f"${{oc.env:{NAME}}}"}
    shown = (
        "pad_token eos_token bos_token_id unk_token max_tokens num_tokens tokenizer tokens_per_second author key "
        "num_key_value_heads query_key sort_keys seed path env environment_name monitor passes header_size"
    )
    for key in shlex.split(shown):
        assert masked({"a": {key: "text"}}) == {"a": {key: "text"}}, key
        assert masked_word(f"a.{key}=text") == f"a.{key}=text"


TEXTS = [
    before + opening + name + after
    for before in ("", "a", "\\", "\\\\", "a\\\\\\")
    for opening in ("${", "${${", "$${", "\\${")
    for name in (f"oc.env:{NAME}", "a", "a.b", "", ":", f"oc.decode:${{oc.env:{NAME}}}", "oc.env:${a}")
    for after in ("}", "", "}}", "} ${a}")
]


def test_a_literal_text_refers_to_nothing() -> None:
    """560 texts with references, whole, nested, escaped and broken: each is read as it was."""
    given = {"a": {"b": TEXTS}}
    cfg = OmegaConf.create(literal(given))
    assert OmegaConf.to_container(cfg, resolve=True) == given
    assert plain_values(cfg) == given
    again = OmegaConf.create(OmegaConf.to_yaml(settled(cfg)))
    assert OmegaConf.to_container(again, resolve=True) == given


def test_only_references_to_the_environment_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine ways to refer to a variable, and five that do not; a value of a variable is no reference itself."""
    monkeypatch.setenv("TRAINWRIGHT_TEST_OTHER", f"${{oc.env:{NAME}}}")
    monkeypatch.setenv("TRAINWRIGHT_TEST_JSON", "{x: 3}")
    OmegaConf.register_new_resolver("trainwright_test_upper", str.upper, replace=True)
    kept = {
        "plain": f"${{oc.env:{NAME}}}",
        "default": "${oc.env:TRAINWRIGHT_TEST_NONE,7}",
        "within": f"a ${{oc.env:{NAME}}} b",
        "by_name": "${oc.env:${name}}",
        "decoded": "${oc.decode:${oc.env:TRAINWRIGHT_TEST_JSON}}",
        "of_key": "${plain}",
        "selected": "${oc.select:plain}",
        "called": "${trainwright_test_upper:${plain}}",
        "resolver": f"${{oc.${{part}}:{NAME}}}",
    }
    others = {"name": NAME, "part": "env", "seed": 3, "same": "${seed}"}
    others |= {"items": ["${seed}", "${.0}"], "all": "${items}"}
    cfg = OmegaConf.create({**kept, **others, "other": "${oc.env:TRAINWRIGHT_TEST_OTHER}"})
    found = settled(cfg)
    raw: Any = OmegaConf.to_container(found, resolve=False)
    assert {key: raw[key] for key in kept} == kept
    assert {key: raw[key] for key in others} == {**others, "same": 3, "items": [3, 3], "all": [3, 3]}
    assert SECRET not in OmegaConf.to_yaml(found)
    assert resolved(found).other == f"${{oc.env:{NAME}}}"
    assert (found.within, found.decoded, found.called) == (f"a {SECRET} b", {"x": 3}, SECRET.upper())
    assert variables_of(cfg) == {NAME, "TRAINWRIGHT_TEST_NONE", "TRAINWRIGHT_TEST_OTHER", "TRAINWRIGHT_TEST_JSON"}
    OmegaConf.clear_resolver("trainwright_test_upper")


CALLED: list[str] = []
FORMS: list[Any] = [
    {"dsn": f"${{oc.env:{NAME}}}"},
    {"dsn": f"x ${{oc.env:{NAME}}} y"},
    {"dsn": f"${{oc.decode:${{oc.env:{NAME}}}}}"},
    {"dsn": "${a}", "a": "${b}", "b": f"${{oc.env:{NAME}}}"},
    {"dsn": f"${{oc.select:a,${{oc.env:{NAME}}}}}"},
    {"dsn": f"${{oc.create:{{a:${{oc.env:{NAME}}}}}}}"},
    {"dsn": {"deep": [f"${{oc.env:{NAME}}}", {"a": f"${{oc.env:{NAME}}}"}]}},
    {"dsn": "${trainwright_test_call:1}"},
    {"dsn": f"${{oc.${{a}}:{NAME}}}", "a": "env"},
    {"dsn": "${"},
    {"dsn": "${a}${a}", **{chr(97 + n): f"${{{chr(98 + n)}}}" * 10 for n in range(20)}},
    [f"${{oc.env:{NAME}}}", "${trainwright_test_call:2}"],
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return good_files(tmp_path_factory.mktemp("good") / "good.ckpt")


@pytest.mark.sample(6)
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_what_a_checkpoint_holds_is_not_interpolated(good: dict[str, bytes], tmp_path: Path, form: int) -> None:
    """Twelve configurations in a made-up checkpoint, each through five doors: sixty attempts to learn a variable, to
    call a resolver of the program, or to keep the reader busy with references to references."""
    CALLED.clear()
    OmegaConf.register_new_resolver("trainwright_test_call", CALLED.append, replace=True)
    given = FORMS[form]
    state = changed(good["state.json"], hyper_parameters={"width": 2, "given": {"~": "omegaconf", "v": given}})
    path = forge(tmp_path / "made_up", {**good, "state.json": state})
    for kind in ("lightning", "torch"):
        export(str(path), tmp_path / f"{kind}.ckpt", kind)
    loaded = torch.load(tmp_path / "lightning.ckpt", weights_only=True)
    assert loaded["hyper_parameters"]["given"] == given
    found = RunState.open(str(path)).tree["hyper_parameters"]["given"]
    assert isinstance(found, DictConfig | ListConfig)
    assert OmegaConf.to_container(found, resolve=True) == given
    net = Net.load_from_checkpoint(str(path))
    net.save_hyperparameters({"given": found})
    again = trainer()
    again.fit(net, loader(), ckpt_path=str(path))
    again.save_checkpoint(tmp_path / "again.ckpt")
    assert files_with(SECRET, tmp_path) == []
    assert CALLED == []
    OmegaConf.clear_resolver("trainwright_test_call")


def test_pods_must_be_given_the_variables_that_are_referred_to() -> None:
    cfg = OmegaConf.create({"module": {"token": f"${{oc.env:{NAME}}}"}, "launch": {"kind": "kubernetes", "env": {}}})
    cfg.launch.secret_env = {}
    [problem] = variable_problems(cfg)
    assert f"type launch.secret_env={{{NAME}: <secret>/<key>}}" in problem
    assert SECRET not in problem
    cfg.launch.secret_env = {NAME: "mine/token"}
    assert variable_problems(cfg) == []
