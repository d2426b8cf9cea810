# Licensed under the Apache License, Version 2.0.
"""Pages in headless Chromium: open, click, choose; afterwards, no error was logged and nothing was requested."""

import json
import shutil
from pathlib import Path


ATTACK = "</script><img src=x onerror=alert(2)>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")


def start():
    """A new browser, which logs errors and requests."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1300,1000"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    browser.set_script_timeout(20)
    return browser


def opened(browser, path: Path):
    """The browser with a page, once its script has run."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(path.as_uri())
    wait(browser, "return document.documentElement.dataset.ready")
    return browser


def wait(browser, condition: str):
    """Waits for a script to return something true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10, 0.02).until(lambda one: one.execute_script(condition))


def check_log(browser, path: Path) -> None:
    """Asserts that the page at `path` logged nothing, and requested nothing but itself."""
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert {url.partition(",")[0] if url.startswith("data:") else url for url in urls} <= {
        path.as_uri(),
        "data:image/png;base64",
    }


def find(browser, selector: str) -> list:
    """The elements of a CSS selector."""
    return browser.find_elements("css selector", selector)


def click(browser, selector: str):
    """Clicks the only element of a CSS selector, and returns it."""
    (found,) = find(browser, selector)
    browser.execute_script("arguments[0].click()", found)
    return found


def choose(browser, selector: str, value: str, event: str = "change") -> None:
    """Sets the value of a menu, or of another control."""
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event(arguments[2], {bubbles: true}))"
    browser.execute_script(script, find(browser, selector)[0], value, event)
