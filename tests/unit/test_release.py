"""A release is what its files say: one version, one dated section, nothing left unreleased."""

from __future__ import annotations

from datetime import date

import pytest

from dev.release import (
    ReleaseError,
    disagreements,
    name_of_tag,
    sections,
    with_section,
    with_version,
)

PROJECT = '[project]\nname = "kombu-binary-delay"\nversion = "0.1.0"\n'
HEAD = "# Changelog\n\nWords.\n\n"
UNRELEASED = (
    f"{HEAD}## [Unreleased]\n\n### Added\n\n- A line.\n\n## [0.0.1] - 2026-01-02\n\n- Old.\n"
)
RELEASED = with_section(UNRELEASED, "0.1.0", date(2026, 3, 4))


def test_what_is_unreleased_becomes_the_section_of_the_version():
    assert sections(RELEASED) == {
        "Unreleased": ("", ""),
        "0.1.0": ("2026-03-04", "### Added\n\n- A line."),
        "0.0.1": ("2026-01-02", "- Old."),
    }
    assert RELEASED.startswith(HEAD)


@pytest.mark.parametrize(
    ("changelog", "version", "words"),
    [
        (UNRELEASED, "0.0.1", "has a section 0.0.1 already"),
        (RELEASED, "0.2.0", "nothing under"),
        (HEAD, "0.1.0", "nothing under"),
    ],
)
def test_a_changelog_without_anything_to_release_is_an_error(changelog, version, words):
    with pytest.raises(ReleaseError, match=words):
        with_section(changelog, version, date(2026, 3, 4))


def test_the_version_is_written_in_its_one_place():
    assert with_version(PROJECT, "0.2.0rc1") == PROJECT.replace("0.1.0", "0.2.0rc1")
    with pytest.raises(ReleaseError, match="0 lines"):
        with_version("[project]\n", "0.2.0")


@pytest.mark.parametrize(
    ("project", "changelog", "version", "words"),
    [
        (PROJECT, RELEASED, "0.1.0", []),
        (
            PROJECT,
            RELEASED,
            "v0.1.0",
            ["no version such as", "has the version 0.1.0", "no section"],
        ),
        (PROJECT.replace("0.1.0", "0.2.0"), RELEASED, "0.1.0", ["0.2.0, not 0.1.0"]),
        (PROJECT, UNRELEASED, "0.1.0", ["no section '## [0.1.0] - DATE'", "changes under"]),
        (PROJECT, RELEASED.replace(" - 2026-03-04", ""), "0.1.0", ["no date"]),
        (PROJECT, RELEASED.replace("2026-03-04", "2026-3-4"), "0.1.0", ["no date"]),
        (PROJECT, RELEASED.replace("2026-03-04", "2026-02-30"), "0.1.0", ["no date"]),
        (PROJECT, RELEASED.replace("### Added\n\n- A line.", ""), "0.1.0", ["is empty"]),
        (PROJECT, RELEASED.replace("## [Unreleased]\n", ""), "0.1.0", ["no section '## [Unrel"]),
        (PROJECT, RELEASED.replace("sed]\n", "sed]\n\n- More.\n"), "0.1.0", ["changes under"]),
    ],
)
def test_what_keeps_a_release_from_being_made_is_named(project, changelog, version, words):
    found = disagreements(project, changelog, version)

    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert word in text


def test_a_tag_has_a_v_before_the_version():
    assert name_of_tag("0.1.0") == "v0.1.0"
