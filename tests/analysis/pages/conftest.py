# Licensed under the Apache License, Version 2.0.
"""The browser of the tests of pages."""

import browsing
import pytest


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    if not (browsing.CHROMIUM and browsing.DRIVER):
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    started = browsing.start()
    yield started
    started.quit()
