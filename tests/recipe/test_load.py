"""From files, mappings and overrides to one checked recipe."""

from pathlib import Path

import pytest
import yaml

from shoal.core.errors import UserError
from shoal.recipe.load import load_recipe, shipped_recipes


def test_no_recipe_means_digits():
    assert load_recipe().recipe == load_recipe(["digits"]).recipe
    assert load_recipe().recipe.name == "digits"


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_loads_and_its_resolved_form_loads_to_itself(name):
    loaded = load_recipe([name])
    assert loaded.recipe.name == name
    assert load_recipe([yaml.safe_load(loaded.to_yaml())]).recipe == loaded.recipe


def test_the_shipped_recipes_are_the_promised_ones():
    promised = "digits mnist fashion_mnist cifar10 cifar10_vit imagenet agnews shakespeare gpt2 synthetic_mlp"
    assert set(shipped_recipes()) == set(promised.split())
    assert all(len(words) > 20 for words in shipped_recipes().values())


def test_a_file_is_named_by_its_stem_unless_it_says_otherwise(here: Path):
    text = "task: image_classification\nmodel: mlp\ndata: digits\ntrain: {epochs: 1}\n"
    (here / "my run.yaml").write_text(text)
    assert load_recipe(["my run.yaml"]).recipe.name == "my-run"
    (here / "other.yaml").write_text(text + "name: chosen\n")
    assert load_recipe([here / "other.yaml"]).recipe.name == "chosen"


def test_a_file_wins_over_a_shipped_recipe_of_the_same_name(here: Path):
    (here / "digits").write_text("task: image_classification\nmodel: mlp\ndata: digits\ntrain: {epochs: 77}\n")
    assert load_recipe(["digits"]).recipe.train.epochs == 77


def test_later_sources_and_overrides_win(here: Path):
    (here / "a.yaml").write_text("optim: {lr: 0.5, name: sgd}\n")
    (here / "b.yaml").write_text("optim: {lr: 0.25}\n")
    recipe = load_recipe(["digits", "a.yaml", "b.yaml"], ["optim.momentum=0.9", "optim.momentum=0.8"]).recipe
    assert (recipe.optim.lr, recipe.optim.name, recipe.optim.momentum) == (0.25, "sgd", 0.8)
    assert recipe.optim.schedule == "cosine"


def test_overrides_from_python_keep_their_types():
    recipe = load_recipe(["digits"], {"optim.lr": 0.125, "model.channels": [2, 4]}).recipe
    assert recipe.optim.lr == 0.125 and recipe.model.channels == [2, 4]


def test_references_are_resolved_for_the_run_and_kept_in_what_is_written(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOAL_TEST_LR", "0.375")
    monkeypatch.setenv("SHOAL_TEST_DIR", "secret-place")
    loaded = load_recipe(["mnist"], ["optim.lr=${env:SHOAL_TEST_LR}", "data.dir=${env:SHOAL_TEST_DIR}/mnist"])
    assert loaded.recipe.optim.lr == 0.375 and loaded.recipe.data.dir == "secret-place/mnist"
    assert "secret-place" not in loaded.to_yaml() and "${env:SHOAL_TEST_DIR}/mnist" in loaded.to_yaml()
    again = load_recipe([yaml.safe_load(loaded.to_yaml())])
    assert again.recipe == loaded.recipe


def test_variables_that_the_run_will_have_elsewhere_need_not_be_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BUCKET", raising=False)
    override = "checkpoint.upload_to=s3://${env:BUCKET}/runs"
    with pytest.raises(UserError, match="BUCKET"):
        load_recipe(["digits"], [override])
    loaded = load_recipe(["digits"], [override], is_elsewhere=True)
    assert "s3://${env:BUCKET}/runs" in loaded.to_yaml() and "elsewhere" not in loaded.to_yaml()
    monkeypatch.setenv("BUCKET", "known")
    assert load_recipe(["digits"], [override], is_elsewhere=True).recipe.checkpoint.upload_to == "s3://known/runs"


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=SECRET",
        "optim.name=SECRET",
        "model.channels=[1, 'SECRET']",
        "model.name=SECRET",
        "train=SECRET",
        "data={name: digits, x: 'SECRET'}",
        "checkpoint.metric=SECRET",
        "parallel.strategy=SECRET",
    ],
)
def test_an_error_shows_the_reference_and_not_the_secret(override: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOAL_TEST_SECRET", "hunter2")
    with pytest.raises(UserError) as caught:
        load_recipe(["digits"], [override.replace("SECRET", "${env:SHOAL_TEST_SECRET}")])
    assert "hunter2" not in str(caught.value)


def test_micro_batch_follows_from_the_global_batch_and_the_workers():
    recipe = load_recipe(["digits"]).recipe
    assert [recipe.micro_batch(world_size) for world_size in (1, 2, 3, 64)] == [64, 32, 22, 1]
    fixed = load_recipe(["digits"], ["train.micro_batch=16"]).recipe
    assert [fixed.micro_batch(world_size) for world_size in (1, 2, 3)] == [16, 16, 16]


def test_a_run_of_several_files_is_named_by_the_first_unless_one_says_otherwise(here: Path):
    (here / "a.yaml").write_text("optim: {lr: 0.5}\n")
    (here / "b.yaml").write_text("name: chosen\n")
    assert load_recipe(["digits", "a.yaml"]).recipe.name == "digits"
    assert load_recipe(["b.yaml", "digits", "a.yaml"]).recipe.name == "chosen"


def test_an_error_in_an_override_says_so(here: Path):
    with pytest.raises(UserError, match=r"resnet19.*\[override\]"):
        load_recipe(["digits"], ["model=resnet19"])


def test_a_number_from_the_environment_is_text_where_text_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOAL_TEST_NUMBER", "0123456")
    loaded = load_recipe(
        ["mnist"], ["data.dir=${env:SHOAL_TEST_NUMBER}", "train.global_batch=${env:SHOAL_TEST_NUMBER}"]
    )
    assert loaded.recipe.data.dir == "0123456" and loaded.recipe.train.global_batch == 123456


def test_an_unquoted_reference_in_braces_is_told_how_to_be_written(here: Path):
    (here / "r.yaml").write_text("data: {name: mnist, dir: ${env:HOME}}\n")
    with pytest.raises(UserError, match=r'line 1: not valid YAML: .*quotes around references: "\$\{env:NAME\}"'):
        load_recipe(["r.yaml"])


@pytest.mark.parametrize("stem", ["my recipe (1)", "_x", "\u00e9t\u00e9", "..."])
def test_any_file_name_gives_a_name_for_the_run(here: Path, stem: str):
    (here / f"{stem}.yaml").write_text("task: image_classification\nmodel: mlp\ndata: digits\ntrain: {epochs: 1}\n")
    assert load_recipe([f"{stem}.yaml"]).recipe.name


@pytest.mark.parametrize("sources", [[3], ["digits", 3], [b"x"]])
def test_what_is_not_a_recipe_is_told(sources: list[object]):
    with pytest.raises(UserError, match="should be a name, a path or a mapping"):
        load_recipe(sources)


def test_overrides_from_python_may_be_one_text_and_hold_tuples_and_paths(here: Path):
    assert load_recipe(["digits"], "optim.lr=0.5").recipe.optim.lr == 0.5
    recipe = load_recipe(["mnist"], {"model.channels": (8, 16), "data.dir": here}).recipe
    assert recipe.model.channels == [8, 16] and recipe.data.dir == str(here)
    for wrong in ([1], {1: 2}):
        with pytest.raises(UserError, match="overrides: 1 should be text"):
            load_recipe(["digits"], wrong)


@pytest.mark.parametrize(
    ("given", "fraction", "share"),
    [(None, None, None), (0, None, None), (1, None, None), (0.5, None, 0.5), (0.5, 0.25, 0.25), (1, 0.25, 0.25)],
)
def test_a_share_of_a_gpu_is_that_share_of_its_memory_unless_said(given, fraction, share):
    overrides = {"cluster.gpus_per_worker": given, "cluster.gpu_memory_fraction": fraction}
    cluster = load_recipe(["digits"], overrides).recipe.cluster
    assert cluster.gpus_per_worker == given and type(cluster.gpus_per_worker) is type(given)
    assert cluster.gpu_memory_share == share


def test_a_share_of_a_gpu_stays_as_it_is_in_the_resolved_recipe():
    for given in (0.5, 1, 0):
        tree = yaml.safe_load(load_recipe(["digits"], {"cluster.gpus_per_worker": given}).to_yaml())
        assert tree["cluster"]["gpus_per_worker"] == given and type(tree["cluster"]["gpus_per_worker"]) is type(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [(1.5, "should be at most 1"), (-1, "should be at least 0"), (-0.5, "should be at least 0"), ("half", "number")],
)
def test_more_than_a_gpu_or_less_than_none_is_refused(given, says):
    with pytest.raises(UserError, match=rf"^cluster.gpus_per_worker: .*{says}.*\(given: {given!r}\)"):
        load_recipe(["digits"], {"cluster.gpus_per_worker": given})


def test_workers_share_a_gpu_only_where_their_backend_can():
    two = {"cluster.workers": 2, "cluster.gpus_per_worker": 0.5}
    with pytest.raises(UserError, match=r"^cluster.gpus_per_worker: 0.5 is a share .*one worker, or backend gloo"):
        load_recipe(["digits"], two)
    for other in ({"parallel.backend": "gloo"}, {"cluster.workers": 1}, {"cluster.gpus_per_worker": 1}):
        load_recipe(["digits"], two | other)
