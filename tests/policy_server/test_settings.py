import dataclasses
import importlib.metadata
import sys
import typing
from pathlib import Path
from subprocess import run

import pytest

from engine.settings import EngineSettings
from policy_server.settings import ServerSettings, SettingsError, parse_settings


def parse(*arguments: str, **environment: str) -> ServerSettings:
    return parse_settings(arguments, environment)


def test_nothing_given_is_the_defaults() -> None:
    assert parse() == ServerSettings()
    assert parse().engine == EngineSettings()
    assert parse().host == "127.0.0.1"
    assert parse().max_message_mib == 32
    four_frames_of_three_cameras = 4 * 3 * 720 * 1280 * 3
    assert 1.001 * four_frames_of_three_cameras < parse().max_message_mib * 2**20


def test_every_setting_of_server_and_engine_can_be_given_both_ways() -> None:
    values: dict[str, str] = {}
    odd = {
        "api_key": "k", "allow_origin": "*", "ping_timeout": "8", "device": "cpu", "velocity_thresholds": "0.7,0.6",
        "velocity_countdowns": "7,7", "kv_fraction": "0.7", "steps": "16",
    }  # fmt: skip
    fields = typing.get_type_hints(ServerSettings) | typing.get_type_hints(EngineSettings)
    for name, kind in fields.items():
        if name in ("engine", "api_key_file"):
            continue
        usual = "yes" if kind in (bool, bool | None) else "7"
        for each in (kind, *typing.get_args(kind)):
            if typing.get_origin(each) is typing.Literal:
                usual = typing.get_args(each)[-1]
        values[name] = odd.get(name, usual)
    flags = [
        part
        for name, value in values.items()
        for part in ([f"--{name.replace('_', '-')}"] + ([value] if value != "yes" else []))
    ]
    from_flags = parse(*flags)
    from_environment = parse(**{f"DREAMZERO_{name.upper()}": value for name, value in values.items()})
    assert from_flags == from_environment
    assert from_flags.engine.steps == 16
    assert from_flags.engine.step_cache == "velocity"
    assert from_flags.engine.velocity_thresholds == (0.7, 0.6)
    assert from_flags.engine.kv_bytes == 7
    assert isinstance(from_flags.engine.guidance_scale, float)
    assert from_flags.tls_cert == Path("7")
    assert from_flags.debug
    usual = dataclasses.asdict(ServerSettings()) | dataclasses.asdict(EngineSettings())
    given = dataclasses.asdict(from_flags) | dataclasses.asdict(from_flags.engine)
    unchanged = {name for name in values if given[name] == usual[name]}
    assert unchanged == {"vae_channels_last"}, "a flag that is on anyway"


def test_the_command_line_wins_over_the_environment() -> None:
    settings = parse("--port", "1", "--no-debug", DREAMZERO_PORT="2", DREAMZERO_HOST="::1", DREAMZERO_DEBUG="1")
    assert (settings.port, settings.host, settings.debug) == (1, "::1", False)


def test_the_key_comes_from_a_file_and_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    settings = parse("--api-key-file", str(file))
    assert settings.api_key == "s3cret"
    assert "s3cret" not in repr(settings)
    assert dataclasses.replace(settings, port=1).api_key == "s3cret"


def test_a_key_on_the_command_line_wins_however_the_environment_gives_another(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.write_text("command-line\n")
    there.write_text("environment\n")
    for arguments in (["--api-key", "command-line"], ["--api-key-file", str(here)]):
        for variable, value in {"DREAMZERO_API_KEY": "environment", "DREAMZERO_API_KEY_FILE": str(there)}.items():
            assert parse(*arguments, **{variable: value}).api_key == "command-line"


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (["--port", "70000"], {}, "port"),
        (["--port", "many"], {}, "port: expected a whole number, found 'many'"),
        (["--steps", "many"], {}, "steps: expected a whole number, found 'many'"),
        (["--steps", "0"], {}, "steps: expected 1 or more, found '0'"),
        (["--preset", "best"], {}, "preset: expected one of release, quality, fast, found 'best'"),
        (["--guidance", "both"], {}, "guidance: expected one of batched, separate, found 'both'"),
        (["--guidance-scale", "nan"], {}, "guidance-scale: expected"),
        (["--sigma-shift", "0"], {}, "sigma-shift: expected 0.01 or more, found '0'"),
        (["--seed", "-1"], {}, "seed: expected 0 or more, found '-1'"),
        (["--seed-per", "robot"], {}, "seed-per: expected one of call, session, found 'robot'"),
        (["--dtype", "float16"], {}, "dtype: expected one of auto, float32, bfloat16, found 'float16'"),
        (["--text-encoder-device", "cuda"], {}, "text-encoder-device: expected one of auto, cpu, found 'cuda'"),
        (["--execution", "fast"], {}, "execution: expected one of auto, eager, compile, graph, found 'fast'"),
        (["--warm-up", "no"], {}, "warm-up: expected one of required, optional, off, found 'no'"),
        (["--attention-backend", "flash"], {}, "attention-backend: expected one of auto, flash-attn-3, flash-attn-4"),
        (["--step-cache", "mask-4"], {}, "step-cache: expected one of none, mask-5, mask-6, mask-7, mask-8, velocity"),
        (["--step-cache", "mask-8", "--steps", "4"], {}, "step-cache: mask-8 is made for 16 steps, not for 4"),
        (["--velocity-thresholds", "0.93,0.95"], {}, "velocity-thresholds: expected falling numbers"),
        (["--velocity-thresholds", "1,0.5"], {}, "velocity-thresholds: expected falling numbers"),
        (["--velocity-thresholds", "nan,0.5"], {}, "velocity-thresholds: expected falling numbers"),
        (["--velocity-thresholds", "high"], {}, "velocity-thresholds: expected a number, found 'high'"),
        (["--velocity-countdowns", "4"], {}, "velocity-countdowns: expected 2 whole numbers"),
        (["--velocity-countdowns", "4,0"], {}, "velocity-countdowns: expected 2 whole numbers"),
        (["--velocity-countdowns", "4,1.5"], {}, "velocity-countdowns: expected a whole number, found '1.5'"),
        (["--device", "toaster"], {}, "device: expected auto, cpu, cuda or cuda:N, found 'toaster'"),
        (["--device", "meta"], {}, "device: expected auto, cpu, cuda or cuda:N, found 'meta'"),
        (["--kv-fraction", "7"], {}, "kv-fraction: expected at most 1, found '7'"),
        (["--kv-bytes", "lots"], {}, "kv-bytes: expected bytes, or a size such as 8GiB, found 'lots'"),
        ([], {"DREAMZERO_KV_BYTES": "-1"}, "DREAMZERO_KV_BYTES: expected"),
        (["--no-such-thing"], {}, "--no-such-thing"),
        (["--max-q", "3"], {}, "--max-q"),
        ([], {"DREAMZERO_PORT": "many"}, "DREAMZERO_PORT"),
        ([], {"DREAMZERO_DEBUG": "perhaps"}, "DREAMZERO_DEBUG"),
        (["--max-queue", "0"], {}, "max-queue"),
        (["--max-connections", "0"], {}, "max-connections"),
        (["--max-message-mib", "-1"], {}, "max-message-mib"),
        (["--session-ttl", "-1"], {}, "session-ttl"),
        (["--drain-timeout", "nan"], {}, "drain-timeout"),
        (["--ping-timeout", "0"], {}, "ping-timeout"),
        (["--ping-timeout", "20"], {}, "ping-timeout: expected more than ping-interval, which is 20 seconds, found 20"),
        (["--max-sessions", "0"], {}, "max-sessions"),
        (["--reply", "list"], {}, "reply: expected one of map, array, found 'list'"),
        (["--log-level", "loud"], {}, "log-level"),
        (["--tls-cert", "cert.pem"], {}, "tls-key"),
        (["--api-key", "a", "--api-key-file", "b"], {}, "one of the two"),
        ([], {"DREAMZERO_API_KEY": "a", "DREAMZERO_API_KEY_FILE": "b"}, "one of the two"),
        (["--api-key-file", "/no/such/file"], {}, "/no/such/file"),
        (["--api-key", "two words"], {}, "api-key"),
        (["--api-key", ""], {}, "api-key: expected a value, found nothing"),
        (["--guidance-scale", "1e308"], {}, "guidance-scale: expected at most 100, found '1e308'"),
        (["--max-connections", "99999999999999999999"], {}, "max-connections: expected at most 100000, found"),
        (["--device", "cuda:٣"], {}, "device: expected auto, cpu, cuda or cuda:N, found"),
        ([], {"DREAMZERO_PING_TIMEOUT": "5"}, "DREAMZERO_PING_TIMEOUT: expected more than ping-interval"),
        (["--host", " "], {}, "host: expected a value, found nothing"),
        (["--host", ""], {}, "host: expected a value, found nothing"),
        ([], {"DREAMZERO_SAVE_VIDEO": ""}, "DREAMZERO_SAVE_VIDEO: expected a value, found nothing"),
        (["--steps", "99999999999999999999"], {}, "steps: expected at most 1000, found"),
        (["--seed", "9223372036854775808"], {}, "seed: expected at most 9223372036854775807, found"),
    ],
)
def test_bad_settings_are_named_in_one_line(arguments: list[str], environment: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError) as raised:
        parse(*arguments, **environment)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("robot-host", False)],
)
def test_loopback_is_told_from_the_network(host: str, loopback: bool) -> None:
    assert ServerSettings(host=host).is_loopback == loopback


def test_the_program_says_one_line_and_exits_2() -> None:
    done = run([sys.executable, "-m", "policy_server", "--port", "many"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "port: expected a whole number" in done.stderr


@pytest.mark.parametrize("command", [[sys.executable, "-m", "policy_server"], ["dreamzero-policy-server"]])
def test_the_version_is_told(command: list[str]) -> None:
    """By the module and by the script that an installation has beside the interpreter."""
    beside = Path(sys.executable).parent
    done = run([beside / command[0], *command[1:], "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, importlib.metadata.version("dreamzero-policy-server"))


@pytest.mark.parametrize(("text", "size"), [("8GiB", 8 * 2**30), ("512MiB", 2**29), ("2GB", 2 * 10**9), ("1000", 1000)])
def test_sizes_are_bytes_or_have_a_unit(text: str, size: int) -> None:
    assert parse("--kv-bytes", text).engine.kv_bytes == size


def test_nothing_is_imported_for_a_bad_setting_that_takes_seconds() -> None:
    code = "import sys, policy_server.settings as s; s.parse_settings([]); print('torch' in sys.modules)"
    done = run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_help_explains_every_setting() -> None:
    done = run([sys.executable, "-m", "policy_server", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for field in (*dataclasses.fields(ServerSettings), *dataclasses.fields(EngineSettings)):
        assert field.name == "engine" or f"--{field.name.replace('_', '-')} " in done.stdout
