"""The callbacks of other libraries' Trainers: the same training, and a plan of its first steps."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest
import torch

import lazyviz
from lazyviz.integrations.first_training_steps import FirstSteps
from lazyviz.testing import PeakExceeded

pytestmark = pytest.mark.slow


def numbers_are_right(numbers):
    assert set(numbers) == {
        "lazyviz/needed_bytes", "lazyviz/projected_peak_bytes", "lazyviz/measured_peak_bytes",
    }  # fmt: skip
    assert numbers["lazyviz/projected_peak_bytes"] == numbers["lazyviz/measured_peak_bytes"] > 0
    assert numbers["lazyviz/needed_bytes"] == pytest.approx(numbers["lazyviz/measured_peak_bytes"], rel=0.3)


# --- transformers ---------------------------------------------------------------------------


def trained_by_transformers(folder, callbacks, **arguments):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=16, vocab_size=32, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(32, (12, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row.clone()} for row in ids]
    settings = {
        "output_dir": str(folder), "max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 2,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
        **arguments,
    }  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=transformers.TrainingArguments(**settings), train_dataset=data, callbacks=callbacks
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}, trainer


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_transformers_trains_the_same_and_logs_the_plan(tmp_path, caplog, accumulated):
    pytest.importorskip("transformers")
    from lazyviz.integrations.transformers import LazyvizCallback

    callback = LazyvizCallback(picture="graph.svg")
    arguments = {"gradient_accumulation_steps": accumulated}
    plain, weights, _ = trained_by_transformers(tmp_path, [], **arguments)
    with caplog.at_level(logging.INFO, "lazyviz"):
        losses, others, trainer = trained_by_transformers(tmp_path, [callback], **arguments)
    assert losses == plain
    assert all(torch.equal(others[name], weights[name]) for name in weights)
    assert callback.findings is not None
    numbers_are_right(callback.findings.numbers)
    assert any("lazyviz/needed_bytes" in entry for entry in trainer.state.log_history)
    assert "needed by the first 2 steps" in caplog.text
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")
    assert lazyviz.doctor().ok


@pytest.mark.filterwarnings("ignore")
def test_transformers_own_loggers_get_the_figures(tmp_path):
    transformers = pytest.importorskip("transformers")
    from lazyviz.integrations.transformers import LazyvizCallback

    told = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            told.append(dict(logs))

    trained_by_transformers(tmp_path, [Reporter(), LazyvizCallback(steps=1)])
    assert any("lazyviz/needed_bytes" in logs for logs in told)


@pytest.mark.filterwarnings("ignore")
def test_the_loggers_of_transformers_get_the_plan_and_the_picture(tmp_path, monkeypatch, caplog):
    transformers = pytest.importorskip("transformers")
    from lazyviz.integrations.transformers import LazyvizCallback

    wandb = types.SimpleNamespace(Image=lambda path: ("image", path), run=MagicMock(summary={}))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    reporters = [transformers.TrainerCallback() for _ in range(4)]
    reporters[0].tb_writer = MagicMock()
    reporters[1]._wandb = wandb
    reporters[2]._ml_flow = MagicMock()
    reporters[3].tb_writer = MagicMock(**{"add_text.side_effect": OSError("disk full")})
    picture = tmp_path / "graph.png"
    callback = LazyvizCallback(picture="graph.png")
    trained_by_transformers(tmp_path, [*reporters, callback])
    assert callback.findings is not None
    plan = callback.findings.plan
    assert "Projected peak on cpu" in plan
    (tag, text, step), _ = reporters[0].tb_writer.add_text.call_args
    assert (tag, text.replace("\n    ", "\n").strip(), step) == ("lazyviz/plan", plan, 1)
    if find_spec("PIL") is None:
        reporters[0].tb_writer.add_image.assert_not_called()
    else:
        (tag, pixels, _), named = reporters[0].tb_writer.add_image.call_args
        assert (tag, pixels.shape[2], named) == ("lazyviz/graph", 3, {"dataformats": "HWC"})
    assert wandb.run.summary == {"lazyviz/plan": plan}
    wandb.run.log.assert_called_once_with({"lazyviz/graph": ("image", str(picture))})
    reporters[2]._ml_flow.log_text.assert_called_once_with(plan, "lazyviz/plan.txt")
    reporters[2]._ml_flow.log_artifact.assert_called_once_with(str(picture), "lazyviz")
    assert "The plan was not logged (_send): OSError: disk full" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_transformers_is_stopped_above_the_budget(tmp_path):
    pytest.importorskip("transformers")
    from lazyviz.integrations.transformers import LazyvizCallback

    with pytest.raises(PeakExceeded, match=r"above the limit of 10.0 KiB"):
        trained_by_transformers(tmp_path, [LazyvizCallback(fail_above="10KiB")])
    lazyviz.reset()


@pytest.mark.filterwarnings("ignore")
def test_a_callback_that_is_not_to_plan_records_nothing(tmp_path):
    pytest.importorskip("transformers")
    from lazyviz.integrations.transformers import LazyvizCallback

    graphs = lazyviz.metrics().get("graphs", 0)
    trained_by_transformers(tmp_path, [LazyvizCallback(plan_first_step=False)])
    assert lazyviz.metrics().get("graphs", 0) == graphs


# --- Lightning ------------------------------------------------------------------------------


def trained_by_lightning(folder, callbacks, fail_at=None, **arguments):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
            self.losses = []

        def training_step(self, batch, batch_idx):
            if batch_idx == fail_at:
                raise KeyError("in a step")
            loss = (self.net(batch) - batch).pow(2).mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    lightning.seed_everything(3, verbose=False)
    loader = torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, default_root_dir=str(folder), **arguments,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader)
    return [loss.item() for loss in module.losses], [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_the_same_and_logs_the_plan(tmp_path, accumulated):
    pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    from lazyviz.integrations.lightning import LazyvizCallback

    callback = LazyvizCallback(picture="graph.svg", fail_above="1GiB")
    losses, weights = trained_by_lightning(tmp_path, [], accumulate_grad_batches=accumulated, logger=False)
    logger = CSVLogger(tmp_path)
    others, lazily = trained_by_lightning(
        tmp_path, [callback], accumulate_grad_batches=accumulated, logger=logger
    )
    assert others == losses
    assert all(map(torch.equal, lazily, weights))
    assert callback.findings is not None
    numbers_are_right(callback.findings.numbers)
    logger.save()
    assert "lazyviz/needed_bytes" in next(tmp_path.rglob("metrics.csv")).read_text()
    assert (tmp_path / "graph.svg").exists()
    assert lazyviz.doctor().ok


@pytest.mark.filterwarnings("ignore")
def test_the_loggers_of_lightning_get_the_plan_and_the_picture(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    from lightning.pytorch.loggers.logger import DummyLogger

    from lazyviz.integrations.lightning import LazyvizCallback

    def stand_in(name):
        return type(name, (DummyLogger,), {"experiment": MagicMock(summary={}), "run_id": "run"})()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Html=lambda text: text[:15]))
    loggers = [stand_in(name) for name in ("TensorBoardLogger", "WandbLogger", "MLFlowLogger", "Another")]
    callback = LazyvizCallback(picture="graph.html")
    trained_by_lightning(tmp_path, [callback], logger=loggers)
    assert callback.findings is not None
    plan = callback.findings.plan
    tensorboard, wandb, mlflow, other = (logger.experiment for logger in loggers)
    assert tensorboard.add_text.call_args[0][0] == "lazyviz/plan"
    tensorboard.add_image.assert_not_called()  # TensorBoard shows no pages
    assert wandb.summary == {"lazyviz/plan": plan}
    wandb.log.assert_called_once_with({"lazyviz/graph": "<!doctype html>"})
    mlflow.log_text.assert_called_once_with("run", plan, "lazyviz/plan.txt")
    mlflow.log_artifact.assert_called_once_with("run", str(tmp_path / "graph.html"), "lazyviz")
    assert other.mock_calls == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_lightning_leaves_nothing_open_where_a_step_fails(tmp_path):
    pytest.importorskip("lightning")
    from lazyviz.integrations.lightning import LazyvizCallback

    with pytest.raises(KeyError, match="in a step"):
        trained_by_lightning(tmp_path, [LazyvizCallback()], fail_at=1, logger=False)
    assert lazyviz.doctor().recording == ()
    with pytest.raises(PeakExceeded, match="above the limit"):
        trained_by_lightning(tmp_path, [LazyvizCallback(fail_above=100)], logger=False)
    assert lazyviz.doctor().recording == ()
    lazyviz.reset()


@pytest.mark.filterwarnings("ignore")
def test_a_picture_makes_its_folder_and_is_no_reason_to_end_a_training(tmp_path, caplog):
    pytest.importorskip("lightning")
    from lazyviz.integrations.lightning import LazyvizCallback

    callback = LazyvizCallback(picture="graph.svg")
    plain = trained_by_lightning(tmp_path / "new", [callback], logger=False)[0]  # nothing else has made it
    assert (tmp_path / "new" / "graph.svg").exists() and callback.findings.picture is not None
    (tmp_path / "file").write_text("")
    callback = LazyvizCallback(picture=tmp_path / "file" / "graph.svg")
    assert trained_by_lightning(tmp_path, [callback], logger=False)[0] == plain
    assert callback.findings.picture is None and "picture is in" not in callback.findings.text
    assert "The picture was not written: " in caplog.text
    assert lazyviz.doctor().ok


@pytest.mark.parametrize("library", ["transformers", "lightning"])
@pytest.mark.filterwarnings("ignore")
def test_a_training_with_fewer_steps_is_planned_as_far_as_it_goes(tmp_path, caplog, library):
    pytest.importorskip(library)
    callbacks = importlib.import_module(f"lazyviz.integrations.{library}")
    train = trained_by_transformers if library == "transformers" else trained_by_lightning
    for planned in (2, 3):
        callback = callbacks.LazyvizCallback(steps=3, picture="graph.svg")
        caplog.clear()
        with caplog.at_level(logging.INFO, "lazyviz"):
            train(tmp_path / str(planned), [callback], max_steps=planned)
        assert caplog.text.count(f"needed by the first {planned} steps") == 1
        numbers_are_right(callback.findings.numbers)
        assert callback.findings.picture.read_text().startswith("<svg")
        assert lazyviz.doctor().ok


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("steps", [1, 2], ids=["all steps", "fewer steps"])
def test_only_the_first_rank_writes_the_picture(tmp_path, is_first, steps):
    from lazyviz.integrations.transformers import LazyvizCallback

    callback = LazyvizCallback(steps=steps, picture="graph.svg")
    state = types.SimpleNamespace(is_world_process_zero=is_first, log_history=[], global_step=1)
    args = types.SimpleNamespace(output_dir=tmp_path)
    net = torch.nn.Linear(4, 4)
    callback.on_step_begin(args, state, None)
    net(torch.ones(2, 4)).sum().backward()
    callback.on_optimizer_step(args, state, None)
    callback.on_train_end(args, state, None)
    assert (tmp_path / "graph.svg").exists() is is_first
    assert callback.findings is not None
    assert (
        (callback.findings.picture is not None) is ("The picture is in" in callback.findings.text) is is_first
    )


def test_an_error_above_the_budget_is_about_one_run(tmp_path):
    from lazyviz.integrations.first_training_steps import FirstSteps

    first = FirstSteps(fail_above="10KiB", steps=1)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first.begin("four micro-batches whose losses are read")
    for _ in range(4):
        loss = net(torch.ones(64, 32)).pow(2).mean()
        loss.backward()
        loss.item()
    optimizer.step()
    with pytest.raises(PeakExceeded) as caught:
        first.stepped()
    plan = caught.value.plan
    assert plan.peak_bytes == plan.eager_peak_bytes != plan.lazyviz_peak_bytes
    need = str(caught.value).partition("would need ")[2].partition(",")[0]
    assert f"Projected peak on cpu: {need}" in str(caught.value)
    lazyviz.reset()


def test_a_plan_for_another_device_says_where_its_ops_were_recorded():
    def stepped(**options):
        first = FirstSteps(steps=1, **options)
        first.begin("a step")
        torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
        return first.stepped()

    said = "The ops were recorded on cpu; A100-40GB may use other kernels that save other tensors."
    assert said in stepped(device="A100-40GB").text
    assert "recorded on" not in stepped().text
    with pytest.raises(PeakExceeded) as caught:
        stepped(device="A100-40GB", fail_above="1KiB")
    assert said in str(caught.value)
    lazyviz.reset()


@pytest.mark.parametrize(
    "wrong", [{"fail_above": "much"}, {"device": "A1000"}, {"steps": 0}, {"picture": "graph.gif"}]
)
def test_what_is_wrong_is_said_before_the_training(wrong):
    pytest.importorskip("lightning")
    from lazyviz.integrations.lightning import LazyvizCallback

    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        LazyvizCallback(**wrong)


@pytest.mark.parametrize("read", [None, "loss", "gradients"])
def test_the_measured_peak_is_of_the_whole_step_not_of_its_last_run(read):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps = FirstSteps(steps=1)
    steps.begin("step 1")
    loss = model(torch.ones(512, 64)).square().mean()
    if read == "loss":
        loss.item()
    loss.backward()
    if read == "gradients":
        assert model[0].weight.grad.isfinite().all()
    optimizer.step()
    findings = steps.stepped()
    numbers = findings.numbers
    assert numbers["lazyviz/measured_peak_bytes"] == pytest.approx(numbers["lazyviz/needed_bytes"], rel=0.05)
    assert numbers["lazyviz/projected_peak_bytes"] == pytest.approx(
        numbers["lazyviz/measured_peak_bytes"], rel=0.01
    )
    assert ("at a sync point" in findings.text) is (read == "gradients")
