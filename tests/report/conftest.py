"""A real Chromium, Debian's, driven by Debian's chromedriver; nothing is downloaded."""

import json
import os
from pathlib import Path

import pytest

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


class Browser:
    """A page under test, with what it logged and asked for."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, path):
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(Path(path).absolute().as_uri())
        return self

    def js(self, code, *arguments):
        return self.driver.execute_script(code, *arguments)

    def console(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """Return the addresses that the page asked for; a browser's new tab asks for its own."""
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        return [
            m["params"]["request"]["url"]
            for m in messages
            if m["method"] == "Network.requestWillBeSent"
            and not m["params"]["documentURL"].startswith("chrome")
        ]

    def phone(self, width=390, height=844):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def dark(self):
        feature = {"name": "prefers-color-scheme", "value": "dark"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def reset(self):
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    missing = [str(path) for path in (CHROMIUM, DRIVER) if not path.exists()]
    if missing:
        reason = f"{' and '.join(missing)} missing; install chromium and chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium):
    found = Browser(chromium)
    yield found
    found.reset()
