"""Every option of the HTTP server once, in the form of ``engine.config``, from which the command line is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import check_options, option
from engine.errors import ConfigError

# "auto" and the formats of api/tools/formats.py, named here so that the command line loads none of that.
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "generic")
_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Options of the server in front of the engine. Raises ``ConfigError`` for the first one out of its bounds."""

    host: str = option("127.0.0.1", "Address to listen on. 0.0.0.0: reachable from other machines.", group="server")
    port: int = option(8000, "Port to listen on. 0: any free one.", low=0, high=65535, group="server")
    served_model_name: tuple[str, ...] = option(
        (), "Names under which the model is offered; the first is the one that answers carry.", group="server"
    )
    api_key: tuple[str, ...] = option(
        (),
        "Keys, one of which each request must bring as a bearer token. Default: no key is asked for.",
        group="server",
    )
    api_key_file: str | None = option(None, "File with such keys, one a line.", group="server")
    share_cache_between_keys: bool = option(
        False, "Let requests with different keys share the KV of equal prefixes.", group="server"
    )
    tool_call_parser: str = option(
        "auto",
        "How the model writes tool calls. auto: as its chat template does; generic: told in plain text.",
        choices=TOOL_CALL_PARSERS,
        group="server",
    )
    max_request_bytes: int = option(
        4 << 20, "Longest request body that is read.", low=1024, high=1 << 30, group="server"
    )
    max_stored_response_bytes: int = option(
        256 << 20, "Memory for responses that clients may go on from. 0: none is stored.", low=0, group="server"
    )
    stored_response_ttl: float = option(
        86400.0, "Seconds after which a stored response that nobody asks for is forgotten.", low=0, group="server"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Origins whose web pages may ask this server; * for all. Default: none.", group="server"
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests get to finish after the first SIGTERM.", low=0, high=86400, group="server"
    )
    heartbeat_timeout: float = option(
        60.0, "Seconds without a sign of life after which the engine counts as hung.", low=1, high=86400, group="server"
    )
    log_level: str = option("info", "Least severe lines in the log.", choices=_LOG_LEVELS, group="server")

    def __post_init__(self) -> None:
        """Check each option, and that no name or key is empty."""
        check_options(self)
        for flag, values in (("--served-model-name", self.served_model_name), ("--api-key", self.api_key)):
            if not all(value.strip() for value in values):
                raise ConfigError(f"{flag} must not be empty.")

    def keys(self) -> tuple[str, ...]:
        """All keys, those in the file included. Raises ``ConfigError`` if the file cannot be read or holds none."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = Path(self.api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--api-key-file cannot be read as a text file.") from error
        found = tuple(key for line in lines if (key := line.strip()))
        if not found:
            raise ConfigError("--api-key-file holds no key.")
        return self.api_key + found
