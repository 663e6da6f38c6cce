"""What a command shows to a dispatcher, and which certificates it believes, by its flags."""

import ssl
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from rollout_dispatcher.cli.asking.wait_ready import add_authorities
from rollout_dispatcher.cli.loading.problems import ENV_PREFIX
from rollout_dispatcher.cli.loading.toml_file import read_toml
from rollout_dispatcher.cli.options import NONE, Parser
from rollout_dispatcher.security import client_tls, read_token


def add_credentials(parser: Parser) -> None:
    """The flags that `token_of` and `tls_of` read."""
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the secret to show [$DISPATCHER_TOKEN_FILE, token_file in the --config file]",
    )
    add_authorities(parser)
    parser.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate to show, with --tls-client-ca"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    parser.add_argument(
        "--insecure", action="store_true", help="do not verify the dispatcher's certificate"
    )


def token_of(args: Namespace, environ: Mapping[str, str]) -> str | None:
    """The secret that `serve` would ask for, found with the same precedence."""
    path = args.config or environ.get(f"{ENV_PREFIX}CONFIG")
    said = read_toml(Path(path)).values.get("token_file") if path else None
    said = args.token_file or environ.get(f"{ENV_PREFIX}TOKEN_FILE", said)
    return None if said in (None, "", NONE) else read_token(Path(str(said)))


def tls_of(args: Namespace) -> ssl.SSLContext:
    """For an address that needs it."""
    context = client_tls(args.tls_ca, args.tls_cert, args.tls_key)
    if args.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
