"""A login that many people share: wrong tokens are counted by address, and lock nobody out."""

from __future__ import annotations

import http.client
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from headgate.dashboard.login import MAX_TRIES
from service.support import ServiceProcess, running_service

OFFICE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
CSRF = "0" * 32
SETTINGS = "[auth]\nrequired = true\n"


def tried(service: ServiceProcess, token: str, *, source: str) -> tuple[int, str]:
    """Send a token through the login from one of the addresses of this machine."""
    place = urlsplit(service.address).netloc
    connection = http.client.HTTPConnection(place, timeout=30, source_address=(source, 0))
    headers = {
        "Cookie": f"headgate_csrf={CSRF}",
        "Origin": service.address,
        "Content-Type": "application/x-www-form-urlencoded",
    }
    try:
        fields = urlencode({"csrf": CSRF, "token": token})
        connection.request("POST", "/ui/login", fields, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_who_shares_an_address_with_a_guesser_gets_in_and_so_does_everybody_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "headgate.toml").write_text(SETTINGS)
    with running_service(tmp_path) as service:
        token = (tmp_path / "data/token").read_text().strip()
        for number in range(MAX_TRIES):
            assert tried(service, f"hg_{number}", source=OFFICE)[0] == 401
        status, page = tried(service, "hg_wrong", source=OFFICE)
        assert status == 429
        assert "Too many wrong tokens" in page
        assert tried(service, token, source=OFFICE)[0] == 303
        assert tried(service, "hg_wrong", source=ELSEWHERE)[0] == 401
        assert tried(service, token, source=ELSEWHERE)[0] == 303
