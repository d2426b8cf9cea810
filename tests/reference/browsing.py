# Licensed under the Apache License, Version 2.0.
"""Pages in headless Chromium: opens them, waits, clicks, and checks that nothing was logged or requested."""

import json


ATTACK = "</script><img src=x onerror=alert(2)>"
HOVER = "arguments[0].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"


def opened(browser, path):
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(path.as_uri())
    wait(browser, "return document.documentElement.dataset.ready")
    return browser


def wait(browser, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10, 0.02).until(lambda one: one.execute_script(condition))


CHANGES = """
    const done = arguments[arguments.length - 1], act = new Function(arguments[0]);
    let number = 0;
    const observer = new MutationObserver((records) => records.forEach((record) => {
        number += 1 + record.addedNodes.length;
        record.addedNodes.forEach((node) => { number += node.querySelectorAll?.("*").length ?? 0; });
    }));
    observer.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
    act();
    requestAnimationFrame(() => setTimeout(() => { observer.disconnect(); done(number); }));
"""


def number_of_changes(page, script):
    """How many nodes and attributes of a page change while a script acts on it, until the next frame is shown."""
    return page.execute_async_script(CHANGES, script)


def check_log(browser, path):
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert {url.partition(",")[0] if url.startswith("data:") else url for url in urls} <= {
        path.as_uri(),
        "data:image/png;base64",
    }


def find(browser, selector):
    return browser.find_elements("css selector", selector)


def click(browser, selector):
    (found,) = find(browser, selector)
    browser.execute_script("arguments[0].click()", found)
    return found


def shown(browser, side="keys", panel=None):
    """The exact weights beside the tokens of one side, of all panels or of one."""
    where = "" if panel is None else f"#panels .panel:nth-child({panel + 1}) "
    return [float(item.get_attribute("data-weight")) for item in find(browser, f"{where}.{side} .weight")]


def choose(browser, selector, value):
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change', {bubbles: true}))"
    browser.execute_script(script, find(browser, selector)[0], value)
