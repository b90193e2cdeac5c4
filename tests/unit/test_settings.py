"""What a user may set, and what is refused by name."""

import pytest

from kombu_binary_delay import Settings, SettingsError
from kombu_binary_delay.ladder.foreign import FOREIGN_LADDERS


def test_no_settings_are_the_defaults():
    assert Settings.from_transport_options(None) == Settings()
    assert Settings.from_transport_options({"binary_delay": None}) == Settings()
    assert Settings.from_transport_options({"binary_delay": {}}) == Settings()
    assert Settings.from_transport_options({"confirm_publish": True}) == Settings()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"tik": 5}, r"unknown setting 'tik'; did you mean 'tick'\?"),
        ({"zzz": 5}, r"unknown setting 'zzz'; use one of tick, levels"),
        ({7: 5}, "unknown setting 7"),
        ({"tick": 0}, "tick must be a whole number of milliseconds >= 1, got 0"),
        ({"tick": "125"}, "got '125'"),
        ({"levels": 0}, "levels must be a whole number from 1 to 255, .*, got 0"),
        ({"levels": 10**9}, "levels must be a whole number from 1 to 255, .*, got 1000000000"),
        ({"radix": 1}, "radix must be a whole number >= 2, got 1"),
        ({"radix": []}, "at least one level"),
        ({"radix": [2, "4"]}, "radix must be a whole number >= 2, got '4'"),
        ({"radix": [2, 4], "levels": 2}, "leave levels out, got 2"),
        ({"layout": "skp"}, r"did you mean 'skip'\?"),
        ({"lanes": 0}, "lanes must be a whole number from 1 to 64, got 0"),
        ({"lanes": True}, "got True"),
        ({"relays": "q"}, "relays must be a list"),
        ({"relays": [1]}, r"got \(1,\)"),
        ({"queue_per_delay": "yes"}, "True or False, got 'yes'"),
        ({"jitter": -1}, "jitter must be a number of milliseconds from 0 to 268435455875"),
        ({"jitter": float("nan")}, "got nan"),
        ({"jitter": True}, "got True"),
        ({"jitter": "60"}, "got '60'"),
        ({"jitter": 1001, "levels": 3, "radix": 2}, "from 0 to 875, .* got 1001"),
        ({"foreign_ladder": "nservicebuss"}, r"did you mean 'nservicebus'\?"),
        (
            {"foreign_ladder": "celery", "tick": 5},
            "tick cannot be set for the ladder of 'celery', got 5",
        ),
        ({"foreign_ladder": "celery", "queue_per_delay": True}, "queue_per_delay cannot be set"),
        ({"levels": 33}, "x-message-ttl"),
        ({"queue_type": "quorom"}, r"must be one of .* did you mean 'quorum'\?"),
        ({"queue_type": ["quorum"]}, "queue_type"),
        ({"amendments": 1}, "True or False, got 1"),
        ({"declare": "eager"}, "'lazy', 'never'"),
        ({"journal": "Stream"}, r"a folder's path with a slash .* did you mean 'stream'\?"),
        ({"journal": "journal"}, "such as './journal', or None, got 'journal'"),
        ({"namespace": "a.b"}, "namespace"),
        ({"namespace": ""}, "namespace"),
        ({"namespace": "n" * 33}, "namespace"),
        ({"namespace": None}, "namespace"),
        ({"namespace": "amq"}, "RabbitMQ reserves"),
        ("quorum", "must be a mapping"),
        ([], "must be a mapping"),
    ],
)
def test_a_bad_setting_is_refused_by_name(given, complaint):
    with pytest.raises(SettingsError, match=complaint):
        Settings.from_transport_options({"binary_delay": given})


def test_the_levels_are_quorum_queues_unless_the_user_says_otherwise():
    assert Settings().topology().queue_type == "quorum"
    assert Settings(queue_type="classic").topology().queue_type == "classic"


@pytest.mark.parametrize(
    ("given", "ladder"),
    [
        ({}, "125ms-2x8-4x4-16x3-8x1"),
        ({"tick": 1000}, "1000ms-2x6-4x4-16x3-8x1"),
        ({"levels": 5}, "125ms-4x1-16x3-8x1"),
        ({"radix": 8}, "125ms-2x1-8x10"),
        ({"radix": 8, "tick": 1000}, "1000ms-3x1-8x9"),
        ({"radix": 2}, "125ms-2x31"),
        ({"radix": 2, "levels": 28, "tick": 1000}, "1000ms-2x28"),
        ({"radix": [24, 60, 60], "tick": 1000}, "1000ms-24x1-60x2"),
    ],
)
def test_tick_radix_and_levels_describe_the_ladder(given, ladder):
    settings = Settings.from_transport_options({"binary_delay": given})

    assert settings.ladder.name == ladder
    assert settings.topology().ladder == settings.ladder


@pytest.mark.parametrize("name", FOREIGN_LADDERS)
def test_a_foreign_ladder_takes_the_place_of_ours(name):
    assert Settings(foreign_ladder=name).topology() is FOREIGN_LADDERS[name]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"binary_dely": {}}, r"option 'binary_dely'; did you mean 'binary_delay'\?"),
        ({"binary-delay": {}}, r"option 'binary-delay'; did you mean 'binary_delay'\?"),
        ({"journal": "stream"}, "'journal' must be inside 'binary_delay'"),
    ],
)
def test_what_stands_where_nothing_reads_it_is_refused(options, complaint):
    with pytest.raises(SettingsError, match=complaint):
        Settings.from_transport_options(options)
