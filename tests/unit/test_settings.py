"""What a user may set, and what is refused by name."""

import pytest

from kombu_binary_delay import Settings, SettingsError


def test_no_settings_are_the_defaults():
    assert Settings.from_transport_options(None) == Settings()
    assert Settings.from_transport_options({"binary_delay": None}) == Settings()
    assert Settings.from_transport_options({"binary_delay": {}}) == Settings()
    assert Settings.from_transport_options({"confirm_publish": True}) == Settings()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"tik": 5}, r"unknown setting 'tik'; did you mean 'tick'\?"),
        ({"zzz": 5}, r"unknown setting 'zzz'; known are tick, levels"),
        ({7: 5}, "unknown setting 7"),
        ({"tick": 0}, "tick must be a whole number of milliseconds >= 1, got 0"),
        ({"tick": "125"}, "got '125'"),
        ({"levels": 0}, "at least one level"),
        ({"levels": 33}, "x-message-ttl"),
        ({"queue_type": "quorom"}, r"must be one of .* did you mean 'quorum'\?"),
        ({"queue_type": ["quorum"]}, "queue_type"),
        ({"protocol_1": 1}, "True or False, got 1"),
        ({"declare": "eager"}, "'lazy', 'never'"),
        ({"namespace": "a.b"}, "namespace"),
        ({"namespace": ""}, "namespace"),
        ({"namespace": "n" * 33}, "namespace"),
        ({"namespace": None}, "namespace"),
        ("quorum", "must be a mapping"),
        ([], "must be a mapping"),
    ],
)
def test_a_bad_setting_is_refused_by_name(given, complaint):
    with pytest.raises(SettingsError, match=complaint):
        Settings.from_transport_options({"binary_delay": given})


def test_the_queue_type_is_the_users_or_else_the_best_that_the_broker_has():
    assert Settings().topology(can_quorum=True).queue_type == "quorum"
    assert Settings().topology(can_quorum=False).queue_type == "classic"
    assert Settings(queue_type="classic").topology(can_quorum=True).queue_type == "classic"
