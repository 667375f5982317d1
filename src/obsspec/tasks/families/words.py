"""Words that the families draw names from: short, plain, lower case, safe in file names and patterns."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "acorn amber anchor apple badge basil beacon birch bottle breeze bridge button cabin candle canyon carbon "
    "castle cedar cherry cinder circle clover cobalt comet copper coral cotton cricket crystal daisy desert diamond "
    "dragon eagle ember engine falcon feather fern field flame forest fountain garden garnet ginger glacier grape "
    "hammer harbor hazel helmet hollow honey island ivory jacket jasmine jungle kettle ladder lantern laurel lemon "
    "lily lizard magnet maple marble meadow mercury mirror moss mountain needle nickel oasis ocean olive onion orange "
    "orchid otter paper pebble pepper pigeon pillow planet plum pocket prairie puzzle quartz rabbit raven ribbon "
    "river robin rocket saddle salmon shadow silver sparrow spring stone summit sunset thistle thunder tiger timber "
    "topaz tulip tunnel turtle valley velvet violet walnut willow window winter yellow"
)
"""Things, for names of files, projects, products and branches."""

VERBS = _words(
    "add build check clean close copy count draw drop fetch fill find fix fold join lift load lock mark merge move "
    "open pack paint pick plan pull push read send shift show sort split start stop test trim turn wash write"
)
"""What programs and commits do."""

PEOPLE = _words(
    "alice amir anna ben carla chen clara daniel diana elena emma erik fatima felix grace hana hugo ines ivan jack "
    "jonas julia karim kenji laura leo lina lucas maria marta max mia mila nadia nina noah olga omar oscar paula "
    "peter priya rosa ruth sam sara sofia theo tom vera victor yara yuki zoe"
)
"""First names."""

DIRECTORIES = _words(
    "area backup base box data desk docs drafts depot export home inbox input items lab library notes office pages "
    "parts plans project records report room samples shelf site source stock store study tools vault"
)
"""Names of directories."""

CITIES = _words(
    "athens bergen berlin boston cairo delhi dublin geneva havana lagos lima lisbon london madrid milan nairobi oslo "
    "paris porto prague quito rome seoul sydney tokyo toronto turin vienna warsaw zurich"
)
"""Cities, for columns and keys."""


def pick(random: Random, items: Sequence[T], n: int) -> list[T]:
    """``n`` different ones of ``items``, in random order."""
    return random.sample(list(items), n)


def misspell(random: Random, name: str) -> str:
    """``name`` as a hasty typist writes it: one of its letters, not the first, is missing."""
    letters = [i for i, character in enumerate(name) if character.isalpha() and i > 0]
    i = random.choice(letters[:-1] or letters)
    return name[:i] + name[i + 1 :]
