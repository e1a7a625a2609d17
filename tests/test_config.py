from __future__ import annotations

import pytest

from etcl_deploy.config import Config
from etcl_deploy.errors import ConfigError
from etcl_deploy.settings import config_from, load_recipe, parse_settings


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
