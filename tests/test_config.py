from __future__ import annotations

from pathlib import Path

import pytest

from etcl_deploy.config import Config
from etcl_deploy.errors import ConfigError
from etcl_deploy.settings import (
    config_from,
    flat,
    load_recipe,
    missing_from,
    parse_settings,
    preset_names,
    recipe_names,
    with_preset,
)

# The table of hyperparameters in the paper's appendix: backbone, batch size, epochs, learning rate, c, delta.
TABLE: dict[str, tuple[object, ...]] = {
    "pmnist": ("fcn3", 10, 5, 0.001, 0.5, 0.80),
    "npmnist": ("fcn3", 10, 5, 0.001, 0.5, 0.80),  # "the same as the ones used on PMNIST"
    "cifar100": ("alexnet", 64, 100, 0.001, 0.5, 0.70),
    "cifar100_sup": ("lenet5", 64, 100, 0.001, 0.5, 0.60),
    "mini_imagenet": ("resnet18", 64, 200, 0.1, 0.5, 0.95),
    "five_datasets": ("resnet18", 64, 100, 0.1, 0.5, 0.50),
    "femnist1": ("resnet18", 64, 50, 0.1, 0.4, 0.57),
    "femnist2": ("resnet18", 64, 50, 0.1, 0.4, 0.58),
    "celeba1": ("resnet18", 16, 100, 0.1, 0.4, 0.65),
    "celeba2": ("resnet18", 16, 100, 0.1, 0.4, 0.77),
    "emnist_femnist1": ("alexnet", 128, 200, 0.001, 0.5, 0.60),
    "cifar100_celeba1": ("alexnet", 64, 200, 0.001, 0.4, 0.60),
}
# The rows of the network that the authors' mixed scripts learn.
TABLE_FCN3: dict[str, tuple[object, ...]] = {
    "emnist_femnist1": ("fcn3", 64, 50, 0.01, 0.5, 0.58),
    "cifar100_celeba1": ("fcn3", 64, 50, 0.01, 0.2, 0.70),
}
COLUMNS = ("backbone", "batch_size", "epochs", "learning_rate", "density", "margin")
UNSTATED = ["digits", "mixed"]  # recipes of data the paper does not have


def test_json_round_trip() -> None:
    """A config survives being stored in a run."""
    config = load_recipe("digits").with_values({"epochs": 7, "width": 9})
    assert config_from(config.as_json()) == config
    assert config.recipe == "digits"


def test_settings_are_typed_and_reach_their_section() -> None:
    """`--set` words become numbers or text, wherever the field lives."""
    config = Config().with_values(parse_settings(["learning_rate=1", "optimizer=sgd", "size=28", "tasks=2"]))
    assert config.learning.learning_rate == 1.0
    assert config.learning.optimizer == "sgd"
    assert (config.images.size, config.tasks) == (28, 2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["epoch=3"], "unknown setting 'epoch'; known: .*epochs"),
        (["epochs"], "takes key=value"),
        (["epochs=many"], "epochs must be int, not 'many'"),
        (["epochs=0"], "epochs must be at least 1, not 0"),
        (["batch_size=1"], "batch_size must be at least 2"),
        (["validation_share=1.0"], "validation_share must be 0 up to 1"),
        (["learning_rate=nan"], "learning_rate must be above 0"),
        (["patience=-1"], "patience must be 0 or more"),
        (["width=0"], "width must be 1 to 65536"),
        (["density=1.5"], "density must be above 0, at most 1"),
        (["density=nan"], "density must be"),
        (["mean=nan"], "mean must be"),
        (["std=inf"], "std must be"),
        (["seed=20000000000000"], "seed must be"),
        (["optimizer=lion"], "one of adam, sgd"),
        (["seed=true"], "seed must be int"),
        (["images=3"], "unknown setting 'images'"),
    ],
)
def test_wrong_settings_are_refused(words: list[str], reason: str) -> None:
    """A wrong key or value says what would be right."""
    with pytest.raises(ConfigError, match=reason):
        Config().with_values(parse_settings(words))


def test_unknown_keys_of_a_recipe_are_refused() -> None:
    """A typo in a TOML file is found."""
    with pytest.raises(ConfigError, match=r"unknown key 'densty' in \[network\]"):
        config_from({"network": {"densty": 0.5}})


def test_unknown_recipe_lists_the_known_ones() -> None:
    """A recipe that does not exist says which do."""
    with pytest.raises(ConfigError, match=r"unknown recipe 'digit'; known: .*digits"):
        load_recipe("digit")


def settings(name: str, preset: str | None) -> dict[str, object]:
    """A recipe's settings by their bare names."""
    return flat(load_recipe(name, preset=preset).as_json())


@pytest.mark.parametrize("name", recipe_names())
def test_the_preset_paper_is_the_papers_table(name: str) -> None:
    """Every number of the table, and the equations by their words."""
    found = settings(name, "paper")
    if name in UNSTATED:
        own = settings(name, None)
        expected: tuple[object, ...] = (*(own[key] for key in COLUMNS[:3]), 0.1, own["density"], 0.57)
    else:
        expected = TABLE[name]
    assert tuple(found[key] for key in COLUMNS) == expected
    assert (found["optimizer"], found["momentum"], found["schedule"]) == ("sgd", 0.0, "constant")
    assert (found["alignment"], found["model"], found["backward"]) == ("once", "most_similar", "in_loop")
    assert (found["distance"], found["rule"], found["energy"]) == ("flat_bases", "paper", 0.99)
    assert (found["sample_share"], found["sample_items"], found["scores"]) == (0.05, 2, "carry")
    assert found["rotation"] == found["zoom"] == found["shift"] == 0
    assert (found["recipe"], found["preset"], found["method"]) == (name, "paper", "etcl")


@pytest.mark.parametrize("name", recipe_names())
def test_the_preset_authors_is_the_paper_but_for_the_script(name: str) -> None:
    """What their script does, where it is known; all else as the paper says it."""
    found, paper = settings(name, "authors"), settings(name, "paper")
    different = {key: value for key, value in found.items() if value != paper[key]}
    common = {"preset": "authors", "alignment": "every_step", "distance": "flat_features"}
    expected: dict[str, object] = {**common, "sample_share": 0.001, "sample_items": 300}
    if name in ("femnist1", "femnist2"):
        expected["optimizer"] = "adam"
    if name in ("pmnist", "npmnist"):
        expected["scores"] = "fresh"
    if name in TABLE_FCN3:
        assert tuple(found[key] for key in COLUMNS) == TABLE_FCN3[name]
        changed = [key for key in COLUMNS if found[key] != paper[key]]
        expected |= {"width": 2000, **{key: found[key] for key in changed}}
    if name == "emnist_femnist1":
        expected |= {"size": 28, "channels": 1}
    assert different == expected


def test_a_preset_has_the_papers_images_and_sizes() -> None:
    """Three channels and 32x32 pixels for F-EMNIST; 6,000, 300 and 700 items for PMNIST."""
    assert [settings("femnist1", preset)[key] for preset in (None, "paper") for key in ("size", "channels")] == [
        *(28, 1),
        *(32, 3),
    ]
    found = settings("pmnist", "paper")
    assert found["sequence"] == {"permute": "mnist", "tasks": 10, "items": 6300, "test_items": 700}
    assert round(6300 * float(str(found["validation_share"]))) == 300
    assert settings("cifar100", "paper")["validation_share"] == 0


def test_presets_go_between_the_recipe_and_the_command_line(tmp_path: Path) -> None:
    """recipe < preset < the recipe's own table for it < values; settings of methods are left out."""
    path = tmp_path / "mine.toml"
    path.write_text(
        "sequence = 'digits'\nimages.channels = 1\nlearning.epochs = 9\nlearning.zoom = 0.1\nlearning.momentum = 0.5\n"
        "[methods.etcl]\nlearning_rate = 0.007\npull = 3.0\n"
        "[presets.paper]\nlearning_rate = 0.02\nrotation = 5\n[presets.authors]\nrotation = 6\n"
    )
    assert (settings(str(path), None)["learning_rate"], settings(str(path), None)["zoom"]) == (0.007, 0.1)
    keys = ("epochs", "channels", "zoom", "momentum", "pull", "learning_rate", "rotation")
    assert [settings(str(path), "paper")[key] for key in keys] == [9, 1, 0.0, 0.0, 1.0, 0.02, 5.0]
    assert settings(str(path), "authors")["rotation"] == 6.0
    changed = load_recipe(str(path), preset="paper").with_values({"rotation": 7, "epochs": 1})
    assert (changed.learning.rotation, changed.learning.epochs, changed.preset) == (7.0, 1, "paper")
    path.write_text(f"preset = 'authors'\n{path.read_text('utf-8')}")
    assert settings(str(path), None) == settings(str(path), "authors")
    assert settings(str(path), "paper")["preset"] == "paper"


def test_a_preset_is_recorded_and_its_absence_is_not() -> None:
    """A run without one is written as it always was, and runs of before can be read."""
    config = load_recipe("femnist1", preset="paper")
    assert config_from(config.as_json()) == config and config.as_json()["preset"] == "paper"
    plain = load_recipe("femnist1")
    assert "preset" not in plain.as_json() and config_from(plain.as_json()) == plain
    assert missing_from(plain.as_json()) == []
    assert (
        with_preset(Config(), "paper").learning
        == load_recipe("digits", preset="paper")
        .with_values({"epochs": Config().learning.epochs, "batch_size": Config().learning.batch_size})
        .learning
    )


@pytest.mark.parametrize(
    ("table", "preset", "method", "reason"),
    [
        ("", "papers", None, "unknown preset 'papers'; known: authors, paper"),
        ("", "", None, "unknown preset ''; known: authors, paper"),
        ("", "paper", "wsn", "the preset 'paper' is for the method etcl, not wsn"),
        ("learning.method = 'naive'\n", "paper", None, "the preset 'paper' is for the method etcl, not naive"),
        ("preset = 3\n", None, None, "unknown preset 3; known: authors, paper"),
        ("[presets.mine]\nepochs = 1\n", None, None, "unknown preset 'mine'; known: authors, paper"),
        ("[presets.paper]\nepoch = 1\n", None, None, "unknown setting 'epoch'"),
        ("[presets.paper]\nepochs = 0\n", None, None, "epochs must be at least 1"),
        ("[presets.paper]\nmethod = 'wsn'\n", None, None, "a preset cannot change method"),
        ("presets = 3\n", None, None, r"\[presets.NAME\] must be a table of settings, not 3"),
    ],
)
def test_wrong_presets_are_refused(
    tmp_path: Path, table: str, preset: str | None, method: str | None, reason: str
) -> None:
    """The error says what was found and what would be right, whether the preset is asked for or not."""
    path = tmp_path / "mine.toml"
    path.write_text(f"sequence = 'digits'\n{table}")
    with pytest.raises(ConfigError, match=reason):
        load_recipe(str(path), method, preset)


def test_every_preset_has_its_file() -> None:
    """And none is left over."""
    folder = Path(__file__).parent.parent / "etcl_deploy" / "presets"
    assert sorted(path.stem for path in folder.glob("*.toml")) == preset_names()
