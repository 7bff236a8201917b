"""The pages in a real browser: they work, offline, on a phone, and run no script but their own."""

import threading

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from tests.report.synthetic import METHODS, comparison, history

from equifed.report import as_methods, build, write_report

pytestmark = pytest.mark.long

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """100 clients, 6 methods, 5 seeds."""
    report = build(comparison(), title="Six methods")
    return report, write_report(report, tmp_path_factory.mktemp("six") / "report.html")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run whose names, reasons and title all try to be markup."""
    run = history((HOSTILE, '"><img src=x onerror=alert(2)>', "</script><b>c"), pull=0.5)
    event = {"event": "quarantine", "round": 2, "client": HOSTILE, "reason": "<i>NaN</i>"}
    run.events.append(event)
    report = build(as_methods({HOSTILE: run}), title=HOSTILE)
    path = tmp_path_factory.mktemp("hostile") / "report.html"
    return report, write_report(report, path, per_client=True)


def column(browser, number):
    """Return what a reader sees in a column, top to bottom."""
    code = "return [...document.querySelectorAll(arguments[0])].map((cell) => cell.innerText)"
    return browser.js(code, f"#clients tbody tr td:nth-child({number})")


def click_head(browser, key):
    browser.driver.find_element(By.CSS_SELECTOR, f"th[data-key={key}] button").click()


def test_nothing_is_logged_and_nothing_is_asked_for(six, browser):
    browser.open(six[1])
    assert browser.console() == []
    asked = browser.requests()
    assert six[1].absolute().as_uri() in asked  # so the log does see requests
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert six[1].stat().st_size < 3_000_000


def test_the_worst_served_comes_first(six, browser):
    report, path = six
    browser.open(path)
    shown = column(browser, 1)
    assert len(shown) == 100
    assert shown[0] == report.methods[0].clients[int(np.argmin(report.told[report.lead].value))]


def test_sorting_by_every_column_is_sorting(six, browser):
    report, path = six
    browser.open(path)
    rows, names = report.told[report.lead], report.methods[0].clients
    base = report.told[report.baseline]
    columns = {
        "value": rows.value,
        "change": rows.value - base.value,
        "loss": rows.loss,
        "n": rows.sizes,
        "weight": rows.weight,
    }
    for key, numbers in columns.items():
        head = browser.driver.find_element(By.CSS_SELECTOR, f"th[data-key={key}]")
        click_head(browser, key)
        if head.get_attribute("aria-sort") != "ascending":
            click_head(browser, key)
        assert head.get_attribute("aria-sort") == "ascending"
        first = dict(zip(names, numbers, strict=True))
        up = [first[name] for name in column(browser, 1)]
        assert up == pytest.approx(sorted(numbers), abs=1e-4), key
        click_head(browser, key)
        down = [first[name] for name in column(browser, 1)]
        assert down == pytest.approx(sorted(numbers, reverse=True), abs=1e-4), key
    click_head(browser, "client")
    assert column(browser, 1) == sorted(names)


def test_searching_leaves_those_that_match(six, browser):
    browser.open(six[1])
    box = browser.driver.find_element(By.ID, "search")
    box.send_keys("CLIENT 04")
    assert sorted(column(browser, 1)) == [f"client 04{i}" for i in range(10)]
    assert browser.driver.find_element(By.ID, "shown").text == "10 of 100 clients"
    box.clear()
    box.send_keys("nobody")
    assert column(browser, 1) == []


def test_choosing_a_method_shows_its_numbers(six, browser):
    report, path = six
    browser.open(path)
    click_head(browser, "client")
    for m in (0, 3):
        browser.driver.find_element(By.CSS_SELECTOR, f"#method option[value='{m}']").click()
        shown = [float(text.partition(" %")[0]) for text in column(browser, 2)]
        assert shown == pytest.approx(100 * report.told[m].value, abs=0.051)


def test_hovering_a_client_names_it(six, browser):
    report, path = six
    browser.open(path)
    for m, c in ((0, 0), (5, 17)):
        dot = browser.driver.find_element(By.CSS_SELECTOR, f"circle[data-m='{m}'][data-c='{c}']")
        browser.js("arguments[0].scrollIntoView({block: 'center'})", dot)
        ActionChains(browser.driver).move_to_element(dot).perform()
        tip = browser.driver.find_element(By.ID, "tip")
        assert tip.is_displayed()
        # Another dot may lie on top of this one; whoever is named must be where the pointer is.
        name = tip.text.split(":")[0]
        i = report.methods[0].clients.index(name)
        near = float(report.told[m].value[i]) - float(report.told[m].value[c])
        assert abs(near) < 0.02 and METHODS[m] in tip.text


def test_hovering_the_worst_client_names_it(tmp_path, browser):
    report = build(as_methods(history()))
    browser.open(write_report(report, tmp_path / "report.html"))
    for i, name in enumerate("abc"):
        dot = browser.driver.find_element(By.CSS_SELECTOR, f"#distribution circle[data-c='{i}']")
        browser.js("arguments[0].scrollIntoView({block: 'center'})", dot)
        ActionChains(browser.driver).move_to_element(dot).perform()
        tip = browser.driver.find_element(By.ID, "tip").text
        assert tip.startswith(f"{name}: {100 * report.told[0].value[i]:.1f} %")


def test_four_clients_take_few_words(tmp_path, browser):
    """The page of a run as ``equifed run --report`` writes it."""
    import equifed as ef

    config = {
        "rounds": 20,
        "data": {"name": "heart-disease"},
        "model": {"name": "logistic", "l2": 0.01},
        "algorithm": {"name": "fair-newton", "objective": {"name": "chi-square", "rho": 0.1}},
    }
    runs = ef.run(config, tmp_path / "run")
    browser.open(write_report(runs, tmp_path / "report.html"))
    read = "return document.querySelector('main').innerText"
    words = browser.js(read)
    assert len(words.split()) <= 600
    heads = [
        "Every client", "In numbers", "How sure are we?", "Are clients served alike?",
        "Would clients be better off alone?", "Each client", "How training went",
        "What everything means",
    ]  # fmt: skip
    places = [words.index(f"\n{head}") for head in heads]
    assert places == sorted(places)
    first = browser.driver.find_element(By.ID, "result").text
    assert first.count(". ") == 0 and first.endswith(".")  # one sentence
    browser.js("window.dispatchEvent(new Event('beforeprint'))")  # paper has all of it
    assert "SHA-256" not in words and "SHA-256" in browser.js(read)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_sideways_scrolling(six, hostile, browser, dark):
    pages = [six[1], hostile[1], *sorted(hostile[1].parent.glob("report-clients/*.html"))]
    for page in pages:
        browser.phone()
        if dark:
            browser.dark()
        browser.open(page)
        assert browser.js("return innerWidth") == 390
        assert browser.js("return document.documentElement.scrollWidth") <= 390, page
        background = browser.js("return getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(part) for part in background[4:-1].split(","))
        assert (brightness < 150) == dark
        assert browser.console() == []


def test_names_stay_text(hostile, browser):
    browser.open(hostile[1])
    assert HOSTILE in column(browser, 1)
    assert browser.driver.find_element(By.TAG_NAME, "h1").text == HOSTILE
    assert (
        browser.js(
            "return document.querySelectorAll('main script, main img, td > b, td > i').length"
        )
        == 0
    )
    assert browser.js("return document.scripts.length") == 2  # the data and our own
    dot = browser.driver.find_element(By.CSS_SELECTOR, "#distribution circle[data-c='0']")
    browser.js("arguments[0].scrollIntoView({block: 'center'})", dot)
    ActionChains(browser.driver).move_to_element(dot).perform()
    assert browser.driver.find_element(By.ID, "tip").text.startswith(HOSTILE)
    assert browser.console() == []


def test_no_script_but_our_own_would_run(hostile, browser):
    """The page's policy holds even if escaping failed."""
    browser.open(hostile[1])
    browser.js(
        "const s = document.createElement('script'); s.textContent = 'window.bad = 1';"
        "document.body.append(s);"
    )
    assert browser.js("return window.bad === undefined")
    assert any("Content Security Policy" in line for line in browser.console())


def test_a_participant_sees_itself_and_the_summary(six, tmp_path, browser):
    report, _ = six
    path = write_report(report, tmp_path / "report.html", per_client=True)
    pages = sorted((tmp_path / "report-clients").iterdir())
    assert len(pages) == 100 and path.exists()
    browser.open(pages[41])
    assert browser.driver.find_element(By.TAG_NAME, "h1").text == "client 041"
    text = browser.driver.find_element(By.TAG_NAME, "main").text
    value = report.told[report.lead].value[41]
    assert f"{100 * value:.1f} %" in text and "Average over clients" in text
    others = [name for name in report.methods[0].clients if name != "client 041"]
    source = pages[41].read_text(encoding="utf-8")
    assert not [name for name in others if name in source]
    assert browser.console() == []
    asked = browser.requests()
    assert asked and all(url.startswith(("file:", "data:")) for url in asked)


def test_every_figure_has_words(six, browser):
    browser.open(six[1])
    figures = browser.driver.find_elements(By.TAG_NAME, "figure")
    assert len(figures) >= 4
    for figure in figures:
        drawing = figure.find_element(By.CSS_SELECTOR, "svg[role=img]")
        assert len(drawing.get_attribute("aria-label")) > 40


def test_print_shows_the_whole_table(six, browser):
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.open(six[1])
    assert (
        browser.js("return getComputedStyle(document.querySelector('.tall')).maxHeight") == "none"
    )
    assert (
        browser.js("return getComputedStyle(document.querySelector('.controls')).display") == "none"
    )


def test_the_demo_ends_with_a_report_that_opens(tmp_path, browser):
    from tests.cli.test_cli import equifed

    from equifed.cli.many import METHODS as SHOWN

    page = tmp_path / "report.html"
    told = equifed("demo", "--rounds", 2, "--out", tmp_path)
    assert page.name in told.stdout
    browser.phone()
    browser.open(page)
    text = browser.driver.find_element(By.TAG_NAME, "main").text
    assert all(name in text for name in SHOWN) and "shirt" in text
    assert browser.js("return document.documentElement.scrollWidth") <= 390
    assert browser.console() == []
    asked = browser.requests()
    assert asked and all(url.startswith(("file:", "data:")) for url in asked)


def test_points_of_methods_tell_their_numbers(six, browser):
    browser.phone()
    browser.open(six[1])
    dot = browser.driver.find_element(By.CSS_SELECTOR, "circle.big")
    browser.js("arguments[0].scrollIntoView({block: 'center'})", dot)
    ActionChains(browser.driver).move_to_element(dot).perform()
    assert "average" in browser.driver.find_element(By.ID, "tip").text
    assert browser.js("return document.documentElement.scrollWidth") <= 390
    assert browser.console() == []


def test_a_watched_report_loads_itself_again_until_the_run_has_ended(tmp_path, browser):
    import tomli_w
    from selenium.webdriver.support.ui import WebDriverWait
    from tests.cli.test_cli import equifed
    from tests.cli.test_watching import Gate

    from equifed.runs import run as runs
    from equifed.runs.config import RunConfig

    config, folder, page = tmp_path / "a.toml", tmp_path / "run", tmp_path / "page.html"
    table = {
        "rounds": 4,
        "data": {"name": "fashion-three", "train": 6, "test": 4},
        "model": {"name": "logistic"},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 2}},
    }
    config.write_text(tomli_w.dumps(table))
    gate = Gate(2)
    started = (RunConfig.read(config), folder)
    run = threading.Thread(target=runs.run, args=started, kwargs={"callbacks": [gate]})
    run.start()
    assert gate.there.wait(timeout=120)
    command = ("report", folder, "--page", page, "--watch", "--every", "0.5")
    watching = threading.Thread(target=equifed, args=command)
    watching.start()
    try:
        wait = WebDriverWait(browser.driver, 60)
        wait.until(lambda _: page.exists())
        browser.open(page)
        assert "not finished" in browser.driver.find_element(By.ID, "live").text
        browser.js("window.seen = true")
        wait.until(lambda _: browser.js("return window.seen !== true"))  # a new page by itself
        assert browser.driver.find_elements(By.ID, "live")
    finally:
        gate.go.set()
        run.join()
        watching.join()
    wait.until(lambda _: not browser.driver.find_elements(By.ID, "live"))
    assert not browser.driver.find_elements(By.CSS_SELECTOR, "meta[http-equiv=refresh]")
    assert browser.console() == []


@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_of_a_fit_takes_few_words_and_no_sideways_scrolling(tmp_path, browser, width):
    """Four clients: result, advice, pictures and candidates in at most 600 words."""
    import equifed as ef

    served = ef.fit(ef.load("heart-disease"), seed=1)
    browser.phone(width, 900)
    browser.open(served.report(tmp_path / "report.html"))
    words = browser.js("return document.querySelector('main').innerText")
    assert len(words.split()) <= 600
    assert browser.js("return document.documentElement.scrollWidth") == width
    assert served.chosen.name in browser.driver.find_element(By.ID, "advice").text
    assert browser.console() == []
