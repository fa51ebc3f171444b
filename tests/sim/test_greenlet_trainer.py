"""``transformers.Trainer``, unmodified, as a blocking actor in virtual time."""

import time

import pytest

from grpo_lab.events import Reached
from grpo_lab.sim import GreenletBridge, run_twice, spawn_blocking


@pytest.mark.slow
def test_transformers_trainer_trains_in_virtual_time(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x, labels):
            return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}

    rows = [{"x": [index / 8.0], "labels": [2 * index / 8.0 + 1]} for index in range(8)]

    async def main(context):
        bridge, recorder = GreenletBridge(context.loop), context.recorder("trainer")

        class SyncAndTakeTime(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                time.sleep(30)
                bridge.call(sync(state.global_step), timeout_s=60)

        async def sync(version):
            weight = await bridge.in_caller(model.layer.weight.item)
            recorder.emit(Reached(mark=f"v{version} {weight!r}"))

        torch.manual_seed(0)
        model = Line()

        def train():
            trainer = transformers.Trainer(
                model=model,
                args=transformers.TrainingArguments(
                    output_dir=str(tmp_path),
                    max_steps=6,
                    learning_rate=0.1,
                    per_device_train_batch_size=4,
                    report_to=[],
                    disable_tqdm=True,
                    save_strategy="no",
                    use_cpu=True,
                ),
                train_dataset=rows,
                callbacks=[SyncAndTakeTime()],
            )
            return trainer.train().metrics["train_runtime"]

        return await spawn_blocking(context.loop, train, name="trainer")

    result = run_twice(main, seed=1)
    assert result.value == 180
    assert result.virtual_s == 180
    marks = [record.event.mark for record in result.records]
    assert [mark.split()[0] for mark in marks] == [f"v{step}" for step in range(1, 7)]
    assert len({mark.split()[1] for mark in marks}) == 6
