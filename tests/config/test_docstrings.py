from typing import get_args

import pytest

from klear_core.config.grids import AblationConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import Settings


def classes_in(annotation: object) -> list[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for part in get_args(annotation) for found in classes_in(part)]


def reachable(cls: type[Settings]) -> set[type[Settings]]:
    below = (found for field in cls.model_fields.values() for found in classes_in(field.annotation))
    return {cls}.union(*map(reachable, below))


CLASSES = sorted(reachable(PipelineConfig) | {AblationConfig}, key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_setting_says_what_it_is(cls: type[Settings]) -> None:
    """A nested table says it in the docstring of its class."""
    assert cls.__doc__
    settings = {
        name: field for name, field in cls.model_fields.items() if name != "kind" and not classes_in(field.annotation)
    }
    assert [name for name, field in settings.items() if not field.description] == []
