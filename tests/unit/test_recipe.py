"""Recipes and their files, and the directory that a run writes."""

import dataclasses
import json
import math
import threading
import time
from pathlib import Path

import pytest

from grpo_lab.errors import ConfigError
from grpo_lab.harness.recipe import _RANGES, RECIPES, Recipe, load_recipe, recipe_with
from grpo_lab.harness.run_dir import RunDir, environment, make_run_dir

FIELDS = {field.name: field for field in dataclasses.fields(Recipe)}
FRACTIONS = ("learning_rate", "temperature", "request_timeout", "heartbeat_stale_after_s")
NUMBERS = sorted(_RANGES)
INTEGERS = sorted(set(NUMBERS) - set(FRACTIONS))
FLAGS = sorted(name for name, field in FIELDS.items() if field.type == "bool")
CHOICES = sorted(name for name, field in FIELDS.items() if field.type.startswith("Literal"))
TEXTS = sorted(name for name, field in FIELDS.items() if field.type == "str")


def refused(field, **values):
    """The message of the refusal, which must be about ``field``."""
    with pytest.raises(ConfigError) as refusal:
        Recipe(**values)
    assert refusal.value.field == field
    assert refusal.value.value is values[field]
    assert str(refusal.value).startswith(f"{field}={values[field]!r}: expected ")
    return str(refusal.value)


def allowed_beside(name, value):
    """Other fields that a value at the end of its range needs."""
    needed = {"min_engines": {"engine": "http://127.0.0.1:1"}, "trainer_ranks": {"prompts_per_step": value}}
    return needed.get(name, {})


# ---- values ------------------------------------------------------------------------------------------


def test_every_field_is_of_a_kind_that_is_checked():
    kinds = [*NUMBERS, *FLAGS, *CHOICES, *TEXTS, "out"]
    assert sorted(kinds) == sorted(FIELDS)


@pytest.mark.parametrize("name", NUMBERS)
def test_both_ends_of_a_range_are_allowed(name):
    for edge in _RANGES[name]:
        assert getattr(Recipe(**{name: edge}, **allowed_beside(name, edge)), name) == edge


@pytest.mark.parametrize("name", INTEGERS)
def test_one_below_and_one_above_a_range_are_refused(name):
    low, high = _RANGES[name]
    for beyond in (low - 1, high + 1, -(10**400), 10**400):
        assert f"from {low} to {high}" in refused(name, **{name: beyond})


@pytest.mark.parametrize("name", FRACTIONS)
def test_just_below_and_just_above_a_range_are_refused(name):
    low, high = _RANGES[name]
    for beyond in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf), -1, 10**400):
        assert f"from {low} to {high}" in refused(name, **{name: beyond})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, False, "1", [1], 1j], ids=repr)
def test_what_is_no_number_is_refused(name, value):
    refused(name, **{name: value})


@pytest.mark.parametrize("name", INTEGERS)
def test_fractions_are_no_integers(name):
    low, high = _RANGES[name]
    refused(name, **{name: low + 0.5})
    refused(name, **{name: float(high)})


@pytest.mark.parametrize("name", sorted(set(NUMBERS) - {"max_staleness_steps"}))
def test_a_number_cannot_be_left_out(name):
    refused(name, **{name: None})


def test_the_bound_in_steps_can_be_left_out():
    assert Recipe(max_staleness_steps=None).max_staleness_steps is None


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", "", None], ids=repr)
def test_a_flag_is_true_or_false(name, value):
    assert "true or false" in refused(name, **{name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_one_of_those_it_names(name):
    default = FIELDS[name].default
    for value in ("", default.upper(), f"{default} ", None, 0, [default]):
        assert default in refused(name, **{name: value})


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("value", [None, 3, True, ["a"], b"a"], ids=repr)
def test_a_text_is_a_text(name, value):
    refused(name, **{name: value})


@pytest.mark.parametrize("value", ["", ".", "..", ".hidden", "a/b", "/a", "a\\b", "a\0b"])
def test_a_name_is_that_of_a_directory(value):
    refused("name", name=value)


@pytest.mark.parametrize(
    "value",
    ["", "SIM", "localhost:8000", "ftp://a", "http:/a", "vllm ", "http://", "http://a:x", "http://a:1,"],
)
def test_an_engine_is_known_or_has_an_address(value):
    refused("engine", engine=value)


@pytest.mark.parametrize("value", ["sim", "vllm", "http://a:1", "https://a", "http://a:1, http://b:2"])
def test_engines_that_are_allowed(value):
    assert Recipe(engine=value).engine == value


def test_values_that_do_not_go_together():
    refused("trainer_ranks", trainer_ranks=3, prompts_per_step=4, num_generations=8)
    assert Recipe(trainer_ranks=4, prompts_per_step=2, num_generations=2).trainer_ranks == 4
    assert "engines = 2" in refused("min_engines", min_engines=3, engines=2)
    assert Recipe(min_engines=2, engines=2).min_engines == 2


def test_a_recipe_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().steps = 3


# ---- recipes by name and from files ------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def refused_file(path, *words):
    with pytest.raises(ConfigError) as refusal:
        load_recipe(path)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_goes_through_json(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    values = json.loads(json.dumps(recipe.to_json(), allow_nan=False))
    assert values.keys() == FIELDS.keys()
    assert recipe_with(values, Recipe()) == recipe


def test_the_synchronous_recipe_differs_in_what_it_says_only():
    quick, synchronous = load_recipe("quickstart").to_json(), load_recipe("synchronous").to_json()
    assert {name for name in quick if quick[name] != synchronous[name]} == {"name", "max_staleness"}


def test_an_unknown_recipe_names_the_close_one():
    refused_file("quickstrat", "recipe='quickstrat'", "Did you mean 'quickstart'?", "synchronous", ".toml")
    refused_file("", "recipe=''")


def test_a_file_sets_fields_and_takes_its_name_from_itself(file):
    text = 'steps = 7\nlearning_rate = 1\nloss_type = "grpo"\nclear_cache = false\nout = "there"\n'
    recipe = load_recipe(file(text + "max_staleness_steps = 4\n"))
    expected = Recipe(
        name="mine",
        steps=7,
        learning_rate=1,
        loss_type="grpo",
        clear_cache=False,
        out=Path("there"),
        max_staleness_steps=4,
    )
    assert recipe == expected


def test_an_empty_file_is_the_quickstart(file):
    assert load_recipe(file("")) == dataclasses.replace(Recipe(), name="mine")
    assert load_recipe(file('name = "other"')).name == "other"


def test_a_file_starts_from_its_base(file):
    file('base = "synchronous"\nsteps = 7\nseed = 3\n', "common.toml")
    file('base = "../common.toml"\nseed = 4\n', "more/middle.toml")
    recipe = load_recipe(file('base = "more/middle.toml"\nengines = 2\n'))
    assert (recipe.max_staleness, recipe.steps, recipe.seed, recipe.engines) == (0, 7, 4, 2)
    assert recipe.name == "mine"


def test_a_base_is_looked_for_beside_its_file_wherever_one_is(file, tmp_path, monkeypatch):
    path = file('base = "common.toml"')
    file("steps = 7", "common.toml")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "common.toml").write_text("steps = 8")
    assert load_recipe(path).steps == 7


@pytest.mark.parametrize("value", ["3", "true", "[]", '["smoke"]'])
def test_a_base_is_a_name(file, value):
    refused_file(file(f"base = {value}"), "base=", "in quotes")


def test_bases_that_are_not_there(file, tmp_path):
    refused_file(file('base = "smok"'), "base='smok'", "Did you mean 'smoke'?")
    refused_file(file('base = "gone.toml"'), str(tmp_path / "gone.toml"), "No such file")


def test_a_circle_of_bases_is_refused(file):
    refused_file(file('base = "mine.toml"'), "its own base")
    file('base = "mine.toml"', "other.toml")
    refused_file(file('base = "./other.toml"'), "its own base")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rte = 1", ("learning_rte=1", "Did you mean 'learning_rate'?", "--help")),
        ("frobnicate = 1", ("frobnicate=1", "a field of Recipe.")),
        ("[run]\nsteps = 3", ("run={'steps': 3}",)),
        ('steps = "3"', ("steps='3'", "an integer from 1")),
        ("steps = 3.0", ("steps=3.0", "an integer from 1")),
        ("steps = true", ("steps=True", "an integer from 1")),
        ("steps = 0", ("steps=0", "an integer from 1")),
        ("steps = [3]", ("steps=[3]", "an integer from 1")),
        ("learning_rate = nan", ("learning_rate=nan", "a number from")),
        ("learning_rate = -inf", ("learning_rate=-inf", "a number from")),
        ("learning_rate = 1e400", ("learning_rate=inf", "a number from")),
        ("learning_rate = false", ("learning_rate=False", "a number from")),
        ('max_staleness_steps = ""', ("max_staleness_steps=''", "an integer from 0")),
        ("clear_cache = 1", ("clear_cache=1", "true or false")),
        ('loss_type = "gppo"', ("loss_type='gppo'", "grpo, dapo, dr_grpo")),
        ("out = 3", ("out=3", "a path")),
        ("model = 1979-05-27", ("model=", "a text")),
        ('name = "a/b"', ("name='a/b'", "directory name")),
        ("steps = [", ("mine.toml", "valid TOML")),
        ("steps = 1\nsteps = 2", ("mine.toml", "valid TOML")),
        (b"\xff\xfe\x00", ("mine.toml", "valid TOML", "utf-8")),
    ],
)
def test_what_a_file_cannot_say(file, text, words):
    refused_file(file(text), *words)


def test_files_that_cannot_be_read(tmp_path):
    refused_file(str(tmp_path / "none.toml"), "none.toml", "No such file")
    (tmp_path / "folder.toml").mkdir()
    refused_file(str(tmp_path / "folder.toml"), "folder.toml", "Is a directory")
    refused_file("a\0.toml", "null byte")
    refused_file(str(tmp_path), ".toml file")


# ---- the directory of a run --------------------------------------------------------------------------


def test_a_run_directory_is_named_after_run_and_time(tmp_path):
    before = time.time()
    run = make_run_dir(tmp_path / "a" / "runs", "mine")
    name, date, clock = run.path.name.split("-")
    assert name == "mine"
    assert before - 1 <= time.mktime(time.strptime(f"{date}-{clock}", "%Y%m%d-%H%M%S")) <= time.time()
    assert run.events.is_dir()
    assert run.logs.is_dir()


def test_runs_of_one_second_do_not_share_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    names = [make_run_dir(tmp_path, "mine").path.name for _ in range(3)]
    assert names == ["mine-20260101-000000", "mine-20260101-000000-1", "mine-20260101-000000-2"]
    assert (tmp_path / "latest").resolve().name == names[-1]


def test_latest_points_to_the_newest_run_and_survives_a_move(tmp_path):
    first = make_run_dir(tmp_path / "runs", "first")
    assert (tmp_path / "runs" / "latest").resolve() == first.path
    second = make_run_dir(tmp_path / "runs", "second")
    (tmp_path / "runs").rename(tmp_path / "moved")
    link = tmp_path / "moved" / "latest"
    assert link.is_symlink()
    assert link.resolve() == tmp_path / "moved" / second.path.name
    assert sorted(path.name for path in link.parent.iterdir()) == sorted(
        [first.path.name, second.path.name, "latest"]
    )


def test_a_link_to_a_run_that_was_removed_is_replaced(tmp_path):
    (tmp_path / "latest").symlink_to("gone")
    run = make_run_dir(tmp_path, "mine")
    assert (tmp_path / "latest").resolve() == run.path


def test_a_directory_called_latest_is_left_alone(tmp_path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "kept").write_text("")
    with pytest.raises(ConfigError, match="Is a directory"):
        make_run_dir(tmp_path, "mine")
    assert (tmp_path / "latest" / "kept").exists()
    assert not list(tmp_path.glob(".latest*"))


def test_places_where_no_run_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "else")
    for out in (tmp_path / "file", tmp_path / "file" / "runs", tmp_path / "dangling", Path("/proc/nowhere")):
        with pytest.raises(ConfigError) as refusal:
            make_run_dir(out, "mine")
        assert refusal.value.field == "out"
        assert str(out) in str(refusal.value)
    with pytest.raises(ConfigError, match="too long"):
        make_run_dir(tmp_path / "runs", "x" * 300)


# ---- JSON, whole or not at all -----------------------------------------------------------------------


def test_json_is_written_and_replaced(tmp_path):
    run = RunDir(tmp_path)
    run.write_json("summary.json", {"a": 1, "path": Path("x")})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1, "path": "x"}
    run.write_json("summary.json", {"a": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    values = {"loss": math.nan, "steps": [1.0, -math.inf, {"gap": (math.inf, 2)}]}
    RunDir(tmp_path).write_json("summary.json", values)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    read = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert read == {"loss": None, "steps": [1.0, None, {"gap": [None, 2]}]}


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.write_json("summary.json", {"a": 1})
    with pytest.raises(TypeError):
        run.write_json("summary.json", {("a", "b"): 1})
    write = Path.write_text

    def full_disk(path, text, **options):
        write(path, text[:3], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="No space"):
        run.write_json("summary.json", {"a": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    run, done, seen = RunDir(tmp_path), threading.Event(), []
    run.write_json("summary.json", {"number": -1, "filling": "x" * 100_000})

    def read():
        while not done.is_set():
            seen.append(json.loads((tmp_path / "summary.json").read_text())["number"])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(10_000):
            run.write_json("summary.json", {"number": number, "filling": "x" * 100_000})
            if len(set(seen)) > 10:
                break
    finally:
        done.set()
        reader.join(10)
    assert not reader.is_alive()
    assert len(set(seen)) > 10
    assert seen == sorted(seen)


def test_the_environment_says_what_it_ran_on():
    found = json.loads(json.dumps(environment(), allow_nan=False))
    assert found["packages"]["torch"]
    assert found["python"]
    assert found["cpus"] >= 1
