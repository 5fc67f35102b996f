"""dp report: the page of a real run in a real browser, and the server of a run that goes on."""

import http.client
import json
import shutil
import threading
from urllib.request import urlopen

import numpy as np
import pytest
from browsing import chromium, until
from tiny import write_data, write_input

from allforce import logs
from allforce.cli import main
from allforce.report.html import collect
from allforce.report.serve import Server

EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished training with details of dp test and a scaling table."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_data(folder)
        write_input(folder, training__numb_steps=60)
        assert main(["train", "input.json", "--skip-neighbor-stat"]) == 0
        logs.close()
    x = np.linspace(-2, 2, 12000).reshape(-1, 3)
    np.savetxt(
        folder / "detail.f.out", np.hstack([x, x + 0.1]), header="s: data_fx data_fy data_fz pred_fx pred_fy pred_fz"
    )
    row = {
        "workers": 1,
        "engine": "serial",
        "rate": 10.0,
        "spread": 0.1,
        "speed_up": 1.0,
        "communication": 0,
        "waiting": 0,
    }
    rows = [row, {**row, "workers": 2, "engine": "torch", "rate": 18.0, "speed_up": 1.8}]
    (folder / "scaling.json").write_text(json.dumps({"title": EVIL, "scaling": rows}))
    return folder


def test_what_is_collected(run):
    data = collect(run)
    assert data["end"]["steps"] == 59 and data["verdict"]
    assert data["curve"]["columns"]["step"][-1] == 60 and data["metrics"][-1]["step"] == 60
    (parity,) = data["parity"]
    assert parity["count"] == 12000 and len(parity["data"]) == 3000 and parity["rmse"] == pytest.approx(0.1)
    assert parity["data"] == sorted(parity["data"])
    assert data["scaling"][0]["rows"][1]["speed_up"] == 1.8 and json.loads(data["input"])["model"]


def test_one_file_whole_or_not_at_all(run, tmp_path, capsys):
    target = tmp_path / "r.html"
    assert main(["report", str(run), "-o", str(target)]) == 0
    text = target.read_text()
    assert len(text) < 1_000_000 and "src=" not in text.replace(EVIL, "").replace("src=x", "") and "<link" not in text
    assert main(["report", str(tmp_path)]) == 2 and "to report" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert main(["report", str(run), "-o", str(target / "r.html")]) == 2


# ---- the server


@pytest.fixture
def server(run, tmp_path):
    folder = tmp_path / "live"
    shutil.copytree(run, folder, symlinks=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])  # it still writes
    (folder / "lcurve.out").write_text("".join((folder / "lcurve.out").read_text().splitlines(keepends=True)[:6]))
    with Server(str(folder)) as found:
        found.rest = lines[5:]  # type: ignore[attr-defined]
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def status(server, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    code = connection.getresponse().status
    connection.close()
    return code


def test_only_this_machine_and_only_with_the_token(server):
    assert server.server_address[0] == "127.0.0.1"
    good = f"/?token={server.token}"
    assert status(server, good) == 200 and status(server, f"/data?token={server.token}") == 200
    for path in ("/", "/data", "/?token=", "/?token=x", f"/?token={server.token[:-1]}", "/data?token=%00"):
        assert status(server, path) == 403
    assert status(server, good, host="evil.example") == 403
    assert status(server, f"/../../etc/passwd?token={server.token}") == 404


# ---- the browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


def calm(browser):
    """Nothing went wrong, nothing was loaded from elsewhere, nothing evil ran."""
    assert [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
    assert browser.execute_script("return window.evil") is None


@pytest.fixture
def page(browser, run, tmp_path):
    assert main(["report", str(run), "-o", str(tmp_path / "r.html")]) == 0
    browser.get((tmp_path / "r.html").as_uri())
    until(browser, "charts.size >= 7 && [...charts.values()].every(c => c.plot.root.isConnected)")
    return browser


def test_the_page_shows_the_run(page):
    text = page.execute_script("return document.body.innerText")
    for words in (
        "Learning curve",
        "RMSE of the force, eV/Å",
        "Where the time went",
        "forward",
        "Environment",
        "3,000 of 12,000",
    ):
        assert words in text, words
    assert EVIL in text  # as text
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    heights = page.execute_script("return [...document.querySelectorAll('canvas')].map(c => c.height)")
    assert len(heights) >= 7 and min(heights) > 100
    drawn = "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x > 0))"
    assert page.execute_script(f"return [...document.querySelectorAll('canvas')].every{drawn}")
    calm(page)


def test_zoom_and_hover(page):
    from selenium.webdriver import ActionChains

    over = page.execute_script("return charts.get('curve-rmse_f').plot.over")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    width = over.size["width"]
    ActionChains(page).move_to_element_with_offset(over, width // 4, 0).perform()
    until(page, "/\\d/.test(charts.get('curve-rmse_f').plot.root.querySelector('.u-legend').innerText)")
    before = page.execute_script("const s = charts.get('curve-rmse_f').plot.scales.x; return [s.min, s.max]")
    ActionChains(page).move_to_element_with_offset(over, -width // 4, 0).click_and_hold().move_by_offset(
        width // 3, 0
    ).release().perform()
    low, high = page.execute_script("const s = charts.get('curve-rmse_f').plot.scales.x; return [s.min, s.max]")
    assert before == [0, 60] and before[0] < low < high < before[1]
    ActionChains(page).double_click(over).perform()
    until(page, "charts.get('curve-rmse_f').plot.scales.x.max === 60")
    calm(page)


def test_dark_and_on_a_phone(page):
    look = "getComputedStyle(document.body).backgroundColor"
    colors = []
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        colors.append(page.execute_script(f"return {look}"))
    assert colors == ["rgb(255, 255, 255)", "rgb(20, 23, 28)"]
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.refresh()
    until(page, "charts.size >= 7 && document.querySelectorAll('canvas').length >= 7")
    assert page.execute_script("return document.documentElement.scrollWidth") <= 360  # nothing to push sideways
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    calm(page)


def test_a_run_that_goes_on(browser, server):
    browser.get(server.address)
    until(browser, "document.getElementById('live').textContent.startsWith('live')")
    assert browser.execute_script("return shown.metrics.at(-1).step") == 15 and "not finished" in browser.page_source
    (server.folder / "metrics.jsonl").write_text(
        "".join((server.folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:5]) + "".join(server.rest)
    )
    until(browser, "shown.end && shown.metrics.at(-1).step === 60")
    until(browser, "document.body.innerText.includes('finished, last change')")
    calm(browser)


def test_the_printed_address_works(run):
    with Server(str(run)) as found:
        thread = threading.Thread(target=found.handle_request)
        thread.start()
        with urlopen(found.address, timeout=10) as answer:
            assert b"uPlot" in answer.read() and answer.headers["Cache-Control"] == "no-store"
        thread.join()
