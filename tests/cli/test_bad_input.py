"""Wrong input: one clear message with field and remedy, status 2 (1 in the middle of a run), nothing half-written."""
# ruff: noqa: E501 - a table reads best with a case a line

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shoal.cli.main import run
from tests import fake_data


@dataclass
class Case:
    """Arguments of `shoal`, and what the message must say."""

    arguments: str
    says: tuple[str, ...]
    """Words that must all stand in the message: the field first, then the remedy."""
    files: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], object] | None = None
    status: int = 2


BOMB = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"a{depth + 1}: &a{depth + 1} [" + ", ".join([f"*a{depth}"] * 9) + "]\n" for depth in range(7)
)


# fmt: off
def recipe_cases() -> list[Case]:
    """Mistakes in the recipe itself."""
    return [
        # unknown keys
        Case("train digits optim.lrr=1", ("optim.lrr: unknown key", "did you mean optim.lr?")),
        Case("train digits early_stop.patiance=1", ("early_stop.patiance: unknown key; did you mean early_stop.patience?",)),
        Case("train digits observe.profile.stepz=1", ("observe.profile.stepz: unknown key; did you mean",)),
        Case("train digits --dry-run track.mlflow.uri=http://me:x@h", ("track.mlflow.uri: holds a password",)),
        Case("train digits optimm.lr=1", ("optimm: unknown key", "did you mean optim?")),
        Case("train digits model.chanels=[8]", ("model.chanels: unknown key", "model.channels")),
        Case("train digits data.dir=x", ("data.dir: unknown key", "val_fraction")),
        Case("train digits train.batch_size=8", ("train.batch_size: unknown key", "global_batch")),
        Case("train digits checkpoint.every=8", ("checkpoint.every: unknown key", "every_steps")),
        Case("train r.yaml", ("lr: unknown key", "[r.yaml, line 2]"), {"r.yaml": "task: image_classification\nlr: 3\n"}),
        # wrong types
        Case("train digits optim.lr=fast", ("optim.lr: should be a number", "'fast'")),
        Case("train digits train.epochs=1.5", ("train.epochs: should be a whole number", "1.5")),
        Case("train digits train.epochs=true", ("train.epochs: should be a whole number", "True")),
        Case("train digits train.compile=1", ("train.compile: should be true or false",)),
        Case("train digits train.compile=yes", ("train.compile: should be true or false", "'yes'")),
        Case("train digits model.channels=16", ("model.channels: should be a list",)),
        Case("train digits model.channels=[16,x]", ("model.channels.1: should be a whole number",)),
        Case("train digits optim=adam", ("optim: should be a section",)),
        Case("train digits train=null", ("train: should be a section",)),
        Case("train digits task=[1]", ("task",)),
        Case("train digits train.precision=16", ("train.precision: 16 is not allowed", "bf16")),
        Case("train digits checkpoint.metric=3", ("checkpoint.metric: should be text",)),
        # values out of range
        Case("train digits optim.lr=0", ("optim.lr: should be greater than 0",)),
        Case("train digits optim.lr=-1e-3", ("optim.lr: should be greater than 0",)),
        Case("train digits optim.lr=.inf", ("optim.lr: should be a finite number",)),
        Case("train digits optim.lr=.nan", ("optim.lr: should be a finite number",)),
        Case("train digits train.epochs=0", ("train.epochs: should be greater than 0",)),
        Case("train digits train.global_batch=-8", ("train.global_batch: should be greater than 0",)),
        Case("train digits train.seed=-1", ("train.seed: should be at least 0",)),
        Case("train digits train.clip_norm=0", ("train.clip_norm: should be greater than 0",)),
        Case("train digits model.dropout=1.0", ("model.dropout: should be less than 1",)),
        Case("train digits data.val_fraction=1.0", ("data.val_fraction: should be less than 1",)),
        Case("train digits optim.betas=[0.9]", ("optim.betas: should have at least 2 items",)),
        Case("train digits model.channels=[]", ("model.channels: should have at least 1 item",)),
        Case("train digits cluster.gpus_per_worker=4", ("cluster.gpus_per_worker: should be at most 1",)),
        Case("train digits cluster.gpu_allocator=fast", ("cluster.gpu_allocator: should look like",)),
        Case("train digits name=../x", ("name: should look like",)),
        # names that do not exist
        Case("train digits optim.name=admw", ("optim.name: 'admw' is not allowed", "did you mean adamw?")),
        Case("train digits optim.schedule=cos", ("optim.schedule: 'cos' is not allowed", "cosine")),
        Case("train digits model.name=resnet19", ("model.name: 'resnet19' is unknown", "did you mean resnet18?")),
        Case("train digits data.name=mnits", ("data.name: 'mnits' is unknown", "did you mean mnist?")),
        Case("train digits task=image_clasification", ("task.name", "did you mean image_classification?")),
        Case("train digits parallel.strategy=fsdq", ("parallel.strategy: 'fsdq' is not allowed", "did you mean fsdp?")),
        Case("train digits train.micro_batch=most", ("train.micro_batch", "auto")),
        Case("train digits train.precision=fp8", ("train.precision: 'fp8' is not allowed", "fp16")),
        # what is missing
        Case("train r.yaml", ("train: is required",), {"r.yaml": "task: image_classification\n"}),
        Case("train r.yaml", ("task: is required",), {"r.yaml": "train: {epochs: 1}\n"}),
        Case("train digits model=null", ("model: is required by task image_classification",)),
        Case("train r.yaml", ("data: needs a name",), {"r.yaml": "task: image_classification\nmodel: mlp\ndata: {}\ntrain: {epochs: 1}\n"}),
        Case("train digits train.epochs=null", ("give exactly one of train.epochs and train.steps (neither",)),
        # combinations that cannot work
        Case("train digits train.epochs=1 train.steps=1", ("give exactly one of train.epochs and train.steps (both",)),
        Case("train digits train.micro_batch=48", ("train.micro_batch: 48 does not divide", "nearest that does: 32")),
        Case("train digits train.global_batch=65 --workers 2", ("train.global_batch: 65 is not divisible", "64")),
        Case("train digits parallel.strategy=ZeRO-3", ("parallel.strategy: is called deepspeed with parallel.deepspeed.stage=3 here",)),
        Case("train digits parallel.strategy=hsdp", ("parallel.strategy: is called fsdp with parallel.fsdp.shard_size=node here",)),
        Case("train digits --workers 2 parallel.strategy=deepspeed parallel.deepspeed.config=none.json", ("parallel.deepspeed.config: none.json cannot be read", "leave it out")),
        Case("train digits --workers 2 parallel.strategy=single", ("cluster.workers: 2 workers are not possible", "strategy ddp")),
        Case("train digits --workers 2:1", ("--workers: '2:1' begins with the larger number",)),
        Case("train digits --workers 1:65", ("train.global_batch: 64 is fewer than cluster.workers 65",)),
        Case("train digits --workers 4 parallel.strategy=pipeline", ("parallel.strategy: pipeline needs a model with repeated blocks", "ddp, fsdp")),
        Case("train digits --workers 4 parallel.strategy=tensor", ("parallel.strategy: tensor needs a model with repeated blocks", "gpt, vit")),
        Case("train shakespeare --workers 3 parallel.strategy=tensor", ("parallel.tensor.size: 3 workers cannot share the 4 heads",)),
        Case("train shakespeare --workers 8 train.global_batch=16 parallel.strategy=pipeline", ("parallel.pipeline.stages: 8 workers", "model.layers is 4")),
        Case("train digits --workers 4 parallel.strategy=fsdp parallel.fsdp.shard_size=3", ("parallel.fsdp.shard_size: 3 does not divide the 4 workers", "nearest")),
        Case("train digits --workers 2 parallel.strategy=deepspeed parallel.deepspeed.stage=3 train.compile=true", ("train.compile: does not go with stage 3",)),
        Case("train digits --workers 1:4 parallel.strategy=tensor", ("cluster.min_workers", "tensor")),
        Case("train digits parallel.hierarchical=true parallel.compress=bf16", ("parallel.compress: bf16 does not go with parallel.hierarchical",)),
        Case("train digits parallel.sync_every=2 parallel.compress=bf16", ("parallel.compress: is for gradients", "parallel.sync_every")),
        Case("train digits parallel.sync_every=2 train.precision=fp16", ("train.precision: fp16", "parallel.sync_every", "use bf16")),
        Case("train digits parallel.strategy=ddp parallel.sync_every=4 train.epochs=6", ("train.steps: 138 is not a multiple of parallel.sync_every 4", "train.steps=140")),
        Case("train digits parallel.strategy=ddp parallel.sync_every=4 train.epochs=4", ("evaluate.every_steps: 23 is not a multiple of parallel.sync_every 4", "evaluate.every_steps=24")),
        Case("train digits parallel.strategy=ddp parallel.sync_batch_norm=true cluster.gpus_per_worker=0", ("parallel.sync_batch_norm: PyTorch has it for GPUs only",)),
        Case("train digits nccl.environment.PATH=x", ("nccl.environment.PATH: should look like ^NCCL_", "'PATH'")),
        Case("train digits nccl.p2p_level=NVLINK", ("nccl.p2p_level: 'NVLINK' is not allowed", "did you mean NVL?")),
        Case("train digits --launcher local --address auto", ("--address: is for Ray, but --launcher is local",)),
        Case("train digits optim.momentum=0.9", ("optim.momentum: is for sgd", "remove it")),
        Case("train digits optim.name=sgd optim.betas=[0.9,0.9]", ("optim.betas: is for adam",)),
        Case("train digits optim.name=sgd optim.nesterov=true", ("optim.nesterov: needs", "momentum")),
        Case("train digits optim.schedule=step", ("optim.step_every: is required by optim.schedule step",)),
        Case("train digits optim.step_every=3", ("optim.step_every: is for optim.schedule step", "remove it")),
        Case("train digits optim.scale_lr=linear", ("optim.reference_batch: is required by optim.scale_lr",)),
        Case("train digits model=gpt", ("model.name: 'gpt' does not go with task image_classification", "mlp")),
        Case("train digits data=shakespeare", ("data.name: 'shakespeare' does not go with task", "digits")),
        Case("train digits checkpoint.metric=val_acc", ("checkpoint.metric: 'val_acc' is not reported", "val_accuracy")),
        Case("train synthetic_mlp checkpoint.keep_best=1", ("checkpoint.metric: is required by checkpoint.keep_best",)),
        Case("train digits early_stop.metric=val_f1", ("early_stop.metric: 'val_f1' is not reported", "val_loss")),
        Case("train own.yaml", ("early_stop.mode: whether less or more of 'val_size' is better is not clear", "set min or max"), {"own.yaml": "task: a:B\ntrain: {steps: 1}\nearly_stop: {metric: val_size}\n"}),
        Case("train digits train.global_batch=3000000000 train.micro_batch=7", ("train.micro_batch: 7 does not divide", "nearest that does: 6")),
        Case("train bomb.yaml", ("unfolds to more than 100,000 values",), {"bomb.yaml": BOMB}),
        Case("train agnews data.val_file=null", ("data.val_samples: is required when data.val_file is null",)),
        Case("train agnews data.val_samples=10", ("data.val_samples: splits data.train_file", "drop one")),
        Case("train digits cluster.gpus_per_worker=0 train.precision=tf32", ("train.precision: tf32 needs an NVIDIA GPU",)),
        Case("train digits cluster.gpus_per_worker=0 cluster.gpu_memory_fraction=0.5", ("cluster.gpu_memory_fraction: needs a GPU",)),
        Case("train digits checkpoint.encryption=AES256", ("checkpoint.encryption: AES256 is for checkpoint.upload_to s3://",)),
        Case("train digits checkpoint.upload_to=s3://b checkpoint.kms_key=k", ("checkpoint.kms_key: is for checkpoint.encryption",)),
        Case("train digits checkpoint.upload_to=bucket/folder", ("checkpoint.upload_to:",)),
        Case("train digits checkpoint.upload_to=odd://bucket", ("checkpoint.upload_to: odd:// is not a kind of storage; use s3://",)),
        Case("train digits checkpoint.if_busy=skip", ("checkpoint.if_busy:", "wait", "supersede")),
        Case("train digits model.channels=[8,8,8,8,8]", ("model.channels", "8x8")),
        Case("train digits model=vit model.patch=3", ("model.patch: 3 does not divide",)),
        Case("train digits model=vit model.patch=4 model.heads=5", ("model.heads: 5 does not divide",)),
        Case("train synthetic_mlp train.activation_checkpointing=true model.hidden=[]", ("train.activation_checkpointing",)),
        # references
        Case("train digits data.val_fraction=${env:SHOAL_NOT_SET}", ("data.val_fraction", "SHOAL_NOT_SET is not set", ".env")),
        Case("train digits data.val_fraction=${SHOAL}", ("data.val_fraction", "write ${env:NAME}")),
        Case("train digits name=${env:2x}", ("name", "does not name an environment variable")),
    ]


def file_cases() -> list[Case]:
    """Mistakes in files, arguments and data."""
    mnist = "train mnist data.dir=d data.download=false"
    text = "train shakespeare data.dir=d data.download=false"
    news = "train agnews data.dir=d data.download=false"
    tokens = "train gpt2 data.dir=d train.precision=fp32 train.compile=false"

    def mnist_with(name: str, content: bytes) -> Callable[[Path], object]:
        def write(folder: Path) -> None:
            fake_data.write_idx(folder / "d", 20, 10)
            (folder / "d" / name).write_bytes(content)

        return write

    return [
        # recipes
        Case("train nothing.yaml", ("recipe 'nothing.yaml': no such file",)),
        Case("train digts", ("recipe 'digts'", "did you mean digits?")),
        Case("train folder", ("recipe 'folder': is a folder",), prepare=lambda f: (f / "folder").mkdir()),
        Case("train r.yaml", ("r.yaml: is empty",), {"r.yaml": ""}),
        Case("train r.yaml", ("r.yaml: should be sections",), {"r.yaml": "- a\n- b\n"}),
        Case("train r.yaml", ("r.yaml, line 2: not valid YAML",), {"r.yaml": "task: x\nmodel: {name: [}\n"}),
        Case("train r.yaml", ("train.epochs: is given twice", "line 3"), {"r.yaml": "train:\n  epochs: 1\n  epochs: 2\n"}),
        Case("train r.yaml", ("r.yaml: cannot be read",), prepare=lambda f: (f / "r.yaml").write_bytes(b"\xff\xfe\x00bad")),
        Case("train r.yaml", ("not valid YAML",), {"r.yaml": "task: !!python/object:os.system {}\n"}),
        Case("train digits optim.lr=[1", ("optim.lr: '[1' is not a valid YAML value",)),
        Case("train digits .lr=3", ("'.lr=3'", "section.field=value")),
        Case("train digits optim.lr.x=3", ("optim.lr: should be a number",)),
        # arguments
        Case("train --resume nothing", ("run 'nothing': not found",)),
        Case("train digits --resume x", ("--resume", "leave out the recipe")),
        Case("train digits --run-dir full", ("--run-dir: full is not empty; choose another",), {"full/x": "1"}),
        Case("train digits --run-dir file", ("--run-dir: file is a file",), {"file": "1"}),
        Case("train digits --workers many", ("--workers: 'many' should be a whole number",)),
        Case("train digits --nonsense", ("No such option", "--nonsense")),
        Case("train digits --gpu", ("cluster.gpus_per_worker", "--gpu")),
        Case("trian", ("No such command", "trian")),
        Case("runs show nothing", ("run 'nothing': not found",)),
        Case("runs compare one", ("at least two runs",)),
        Case("checkpoints list nothing", ("run 'nothing': not found",)),
        Case("bench step train.epochs=0", ("train.epochs: should be greater than 0",)),
        # code of the user's own
        Case("train r.yaml", ("task.name: no module named 'nowhere'",), {"r.yaml": "task: nowhere:Task\ntrain: {steps: 1}\n"}),
        Case("train r.yaml", ("task.name: module 'own' has no 'Tsk'", "did you mean Task?"), {"r.yaml": "task: own:Tsk\ntrain: {steps: 1}\n", "own.py": "class Task: pass\n"}),
        Case("train r.yaml", ("task.name: own2:Task has no method loss",), {"r.yaml": "task: own2:Task\ntrain: {steps: 1}\n", "own2.py": "class Task: pass\n"}),
        Case("train r.yaml", ("task.name: importing 'own3' failed: SyntaxError",), {"r.yaml": "task: own3:Task\ntrain: {steps: 1}\n", "own3.py": "class Task\n"}),
        Case("train r.yaml", ("task.args: own4:Task", "size"), {"r.yaml": "task: {name: 'own4:Task', args: {sise: 1}}\ntrain: {steps: 1}\n", "own4.py": "class Task:\n  def __init__(self, size): pass\n"}),
        Case("train r.yaml", ("data: is required, because own5:Task has no method datasets()",), {"r.yaml": "task: own5:Task\ntrain: {steps: 1}\n", "own5.py": "class Task:\n  def loss(self, model, batch): pass\n"}),
        Case("train digits model=nowhere:build", ("model.name: no module named 'nowhere'",)),
        Case("train digits data=nowhere:build", ("data.name: no module named 'nowhere'",)),
        # data
        Case(mnist, ("data.dir", "train-images-idx3-ubyte", "not found", "put it in")),
        Case(mnist, ("data.dir", "train-images", "replace it"), prepare=mnist_with("train-images-idx3-ubyte.gz", gzip.compress(bytes(range(256)) * 9)[:60])),
        Case(mnist, ("data.dir", "train-labels"), prepare=mnist_with("train-labels-idx1-ubyte.gz", b"not gzip at all")),
        Case(mnist, ("data.dir", "t10k-images"), prepare=mnist_with("t10k-images-idx3-ubyte.gz", gzip.compress(b"\0\0\x08\x03" + b"\0" * 12))),
        Case("train cifar10 data.dir=d data.download=false", ("data.dir", "cifar-10", "not found")),
        Case("train imagenet data.dir=d", ("data.dir", "train")),
        Case(news, ("data.dir", "train.csv", "not found")),
        Case(news, ("data.dir", "train.csv", "line 2"), {"d/train.csv": '"1","a","b"\n"2"\n', "d/test.csv": '"1","a","b"\n'}),
        Case(text, ("data.dir", "input.txt", "not found")),
        Case(text, ("data", "input.txt"), {"d/input.txt": "too short"}),
        Case(text, ("data.dir", "input.txt", "UTF-8"), prepare=lambda f: ((f / "d").mkdir(), (f / "d/input.txt").write_bytes(b"\xff" * 9999))),
        Case(tokens, ("data.dir", "train.bin", "not found")),
        Case(tokens, ("data", "train.bin"), prepare=lambda f: (fake_data.write_tokens(f / "d", 5000, 64), (f / "d/train.bin").write_bytes(b"abc"))),
        Case(tokens + " data.context=16 data.vocab_size=8", ("data.vocab_size", "train.bin"), prepare=lambda f: fake_data.write_tokens(f / "d", 5000, 64), status=1),
    ]


def running_cases() -> list[Case]:
    """What comes up in the middle of a run: status 1."""
    task = (
        "import torch\n"
        "class Task:\n"
        "  def model(self): return torch.nn.Linear(2, 1)\n"
        "  def datasets(self): return {'train': [(torch.ones(2), torch.ones(1))] * 40, 'val': [(torch.ones(2), torch.ones(1))]}\n"
        "  def loss(self, model, batch):\n"
    )
    recipe = "task: %s:Task\ntrain: {steps: 4, global_batch: 4}\n"
    return [
        Case("train synthetic_mlp optim.name=sgd optim.lr=1e9 train.steps=200 data.samples=500", ("train loss became", "optim.lr", "train.clip_norm"), status=1),
        Case("train r.yaml", ("train loss became nan after step 0 and by step 1",), {"r.yaml": recipe % "w1", "w1.py": task + "    return model(batch[0]).mean() * torch.nan\n"}, status=1),
        Case("train r.yaml", ("the weights became infinite or nan by step 4", "optim.lr"), {"r.yaml": recipe % "w6", "w6.py": task + "    self.step = getattr(self, 'step', 0) + 1\n    x = model(batch[0]).mean()\n    return (x * 0).sqrt() if self.step == 4 else x\n"}, status=1),
        Case("train r.yaml", ("task.loss returned a tensor of shape (4, 1)", "mean over the batch"), {"r.yaml": recipe % "w2", "w2.py": task + "    return model(batch[0]) - batch[1]\n"}, status=1),
        Case("train r.yaml", ("task.loss returned 'float'",), {"r.yaml": recipe % "w3", "w3.py": task + "    return 0.5\n"}, status=1),
        Case("train r.yaml", ("out of memory", "train.micro_batch below 4", "train.activation_checkpointing"), {"r.yaml": recipe % "w4", "w4.py": task + "    return model(batch[0]).mean() + torch.empty(10**15).mean()\n"}, status=1),
        Case("train r.yaml", ("checkpoint.metric: 'val_f1' is not reported by this task", "val_loss"), {"r.yaml": recipe % "w5" + "checkpoint: {keep_best: 1, metric: val_f1}\n", "w5.py": task + "    return model(batch[0]).mean()\n"}, status=1),
    ]


# fmt: on
ALL = [*recipe_cases(), *file_cases(), *running_cases()]


def test_there_are_enough_cases() -> None:
    assert len(ALL) >= 60


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.arguments[:70])
def test_wrong_input_is_one_clear_message(case: Case, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, content in case.files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(content)
    if case.prepare:
        case.prepare(here)
    before = sorted(here.rglob("*"))
    status = run([*case.arguments.split(" "), *(["--json"] if case.status == 1 else [])])
    out, err = capfd.readouterr()
    assert status == case.status, err
    assert "Traceback" not in err
    for words in case.says:
        assert words in err, f"{words!r} is not in:\n{err}"
    complaints = [line for line in err.splitlines() if line.startswith(("error:", "Error:"))]
    assert complaints, err
    if status == 2:
        assert [path for path in here.rglob("*") if "__pycache__" not in path.parts and path not in before] == []
        assert out == ""
    else:
        assert json.loads(out.splitlines()[-1])["status"] == "failed"
        folder = next((here / "runs").iterdir())
        assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
        assert not list(folder.glob("checkpoints/.writing*"))


def test_all_mistakes_of_a_recipe_are_told_at_once(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "digits", "optim.lr=-1", "train.epochs=x", "model.hiden=3"]) == 2
    err = capfd.readouterr().err
    assert all(field in err for field in ("optim.lr", "train.epochs", "model.hiden"))
    assert len(err.splitlines()) == 3
