"""report.html in a headless Chromium: what a person sees, sorts, filters and opens."""

import json
import shutil

import pytest

from tests.test_experiment import Cycle, many_rows, wait_for

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: it is in the dev group")

EVIL = "$\\frac{$ <script>document.title='owned'</script></script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def browser():
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


@pytest.fixture
def cycle(tmp_path):
    return Cycle(tmp_path / "repo")


def show(browser, cycle):
    """Write the report and open it; no script error, nothing loaded from anywhere."""
    code, out, err = cycle.call("report")
    assert code == 0, err
    assert (cycle.root / "progress.png").read_bytes()[:4] == b"\x89PNG"
    browser.get(f"file://{cycle.root}/report.html")
    assert_quiet(browser)
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded == []


def assert_quiet(browser):
    assert [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]] == []


def select(browser, css):
    return browser.execute_script("return [...document.querySelectorAll(arguments[0])]", css)


def texts(browser, css):
    return browser.execute_script("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", css)


def test_no_row_and_only_crashes(browser, cycle):
    show(browser, cycle)
    assert "no scored run yet" in texts(browser, ".summary")[0] and not select(browser, "tr.run")
    cycle.run("baseline")
    noise = {"key": ["0123456789ab", 300.0, "cpu"], "n": 3, "sd": 0}  # one run, and it repeats itself: no height at all
    (cycle.root / ".autoresearch/noise.json").write_text(json.dumps(noise))
    show(browser, cycle)
    assert "floor    0.000000" in texts(browser, ".summary")[0]
    log = cycle.root / "autoresearch.jsonl"
    log.write_text(log.read_text().replace('"metric": 1.0', '"metric": 0').replace('"keep"', '"crash"'))
    show(browser, cycle)
    assert texts(browser, "td.status") == ["crash"] and texts(browser, "svg text") == ["no scored run yet"]


def test_a_run_opens_with_its_diff_notes_and_curve_and_its_text_stays_text(browser, cycle):
    lines = [json.dumps({"step": n, "elapsed": n / 10, "loss": 9 - n / 50}) for n in range(300)]
    steps = "\\n".join(lines) + "\\n{half"
    cycle.edit(0.9, f"open(os.path.join(folder, 'steps.jsonl'), 'w').write({steps!r}.replace('\\\\n', chr(10)))")
    cycle.run(EVIL, "--asi", json.dumps({"hypothesis": EVIL}))
    with open(cycle.root / "autoresearch.jsonl", "a") as log:  # one far below all others, one far above
        for more in ({"run": 3, "status": "checks_failed", "metric": 0.1}, {"run": 4, "status": "discard", "metric": 7.0}):
            log.write(json.dumps(cycle.rows()[1] | more) + "\n")
    show(browser, cycle)
    assert len(select(browser, "path.higher.discard")) == 1 and not select(browser, "circle.discard")
    assert browser.execute_script("const c = document.querySelector('circle.checks_failed').getBoundingClientRect(), "
                                  "s = document.querySelector('#chart').getBoundingClientRect(); "
                                  "return s.top < c.top && c.bottom < s.bottom")
    assert browser.title == "autoresearch" and not select(browser, "img")
    assert texts(browser, "td.text") == [EVIL, EVIL, EVIL, "baseline"]
    select(browser, "tr.run")[2].click()
    assert json.loads(texts(browser, ".asi")[0]) == {"hypothesis": EVIL}
    assert texts(browser, ".diff .add")[0] == "+SCORE = 0.9\n" and texts(browser, ".diff .del")[0] == "-SCORE = 1.0\n"
    assert "9.000 to 3.0" in texts(browser, ".detail svg text")[0]
    assert browser.execute_script("return document.querySelector('.curve').getBBox().height") > 50
    browser.refresh()  # as the page does by itself under --watch: what was open stays open
    wait_for(lambda: len(select(browser, ".detail")) == 1)
    select(browser, "tr.run")[2].click()
    assert not select(browser, ".detail")
    assert_quiet(browser)


def test_a_thousand_rows_sort_filter_and_hover(browser, cycle):
    cycle.run("baseline")
    many_rows(cycle, 1000)
    show(browser, cycle)
    assert len(select(browser, "tr.run")) == 1000 and len(select(browser, "#chart circle, #chart .x")) == 1000
    assert texts(browser, "tr.run td:first-child")[0] == "1000"
    select(browser, "[data-sort=val_bpb]")[0].click()
    scores = texts(browser, "tr.run td:nth-child(3)")
    real = [float(score) for score in scores if score]
    assert real == sorted(real) and scores[-200:] == [""] * 200
    select(browser, "[data-sort=val_bpb]")[0].click()
    scores = texts(browser, "tr.run td:nth-child(3)")
    assert [float(s) for s in scores[:800]] == sorted(real, reverse=True) and scores[-200:] == [""] * 200
    browser.execute_script("const s = document.querySelector('select'); s.value = 'crash'; s.oninput({target: s})")
    assert set(texts(browser, "td.status")) == {"crash"} and texts(browser, "#count") == ["200 of 1000"]
    select(browser, "input")[0].send_keys("IDEA 97")
    assert len(select(browser, "tr.run")) == 3  # 97, 972, 977
    assert "run 997 keep" in texts(browser, "#chart circle.keep > title")[-1]  # shown on hover
    assert "idea 996" in texts(browser, "#chart circle.keep > title")[-1]
    webdriver.ActionChains(browser).click(select(browser, "#chart circle.keep")[-1]).perform()
    assert not select(browser, ".detail")  # it is filtered out
    for css in ("select", "input"):
        script = "const s = document.querySelector(arguments[0]); s.value = ''; s.oninput({target: s})"
        browser.execute_script(script, css)
    webdriver.ActionChains(browser).click(select(browser, "#chart circle.keep")[-1]).perform()
    assert "idea 996" in texts(browser, ".detail")[0]
    assert_quiet(browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readable_on_a_phone_light_and_dark(browser, cycle, scheme):
    cycle.run("baseline")
    many_rows(cycle, 60)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True})
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    try:
        show(browser, cycle)
        select(browser, "tr.run")[0].click()
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
        small = browser.execute_script("return Math.min(...[...document.querySelectorAll('td, #chart text, .summary')]"
                                       ".filter(e => e.getClientRects().length)"
                                       ".map(e => parseFloat(getComputedStyle(e).fontSize)))")
        assert small >= 11
        script = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
        ink, paper = browser.execute_script(script)
        bright = [sum(map(int, c[4:-1].split(","))) / 765 for c in (ink, paper)]
        assert abs(bright[0] - bright[1]) > 0.6 and (bright[1] < 0.5) == (scheme == "dark")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_watch_rewrites_after_a_run_and_the_page_reloads_itself(cycle):
    cycle.run("baseline")
    process = cycle.start("report", "--watch")
    try:
        assert "wrote" in process.stdout.readline()
        page = (cycle.root / "report.html").read_text()
        assert '"watch": true' in page and "second idea" not in page
        cycle.edit(0.9)
        cycle.run("second idea")
        assert "wrote" in process.stdout.readline()
        assert "second idea" in (cycle.root / "report.html").read_text()
    finally:
        process.terminate()
        process.communicate(timeout=30)
