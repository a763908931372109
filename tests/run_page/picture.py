"""Draw docs/images/run_page.png, the picture of a run report in the documentation.

Train the digits classifier in fp16, and draw the run report of this training::

    python -m recipes.train_digits precision=fp16
    python -m tests.run_page.picture runs/digits_fp16/run.html docs/images/run_page.png

The picture ends below the heat map of the headroom, and has 256 colours.
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH = 1080
_LAST = "chart-bits"


def picture(page_file: Path) -> Image.Image:
    """Return a picture of the page, in light colours."""
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=next(filter(None, browsers)), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(page_file.resolve().as_uri())
        page.wait_for_function("document.documentElement.dataset.drawn", timeout=60_000)
        end = page.evaluate(f"document.getElementById('{_LAST}').getBoundingClientRect().bottom")
        shot = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": end + 16})
        browser.close()
    return Image.open(io.BytesIO(shot)).convert("RGB").quantize(256)


if __name__ == "__main__":
    picture(Path(sys.argv[1])).save(sys.argv[2], optimize=True)
