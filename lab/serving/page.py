#!/usr/bin/env python3
"""Try the page of torchstream serve in a headless Chromium: drop, choose and paste photographs, and send bad uploads.

  page.py URL FOLDER [--browser /usr/lib/chromium/chromium]

FOLDER has photographs in one folder for each class, as the archive of make_models.py. The server is one of its packages, so
that the first class must be the photograph's folder. Needs `pip install playwright`, and a Chromium.
"""

import argparse
import base64
import pathlib

from playwright.sync_api import sync_playwright

DROP = """([name, data]) => {
  const dataTransfer = new DataTransfer()
  dataTransfer.items.add(new File([Uint8Array.from(atob(data), c => c.charCodeAt(0))], name, { type: 'image/jpeg' }))
  for (const kind of ['dragenter', 'dragover', 'drop'])
    document.querySelector('#drop').dispatchEvent(new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true }))
}"""
PASTE = """([name, data]) => {
  const clipboardData = new DataTransfer()
  clipboardData.items.add(new File([Uint8Array.from(atob(data), c => c.charCodeAt(0))], name, { type: 'image/jpeg' }))
  document.dispatchEvent(new ClipboardEvent('paste', { clipboardData, bubbles: true }))
}"""


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("url")
    p.add_argument("folder", type=pathlib.Path)
    p.add_argument("--browser", default="/usr/lib/chromium/chromium")
    a = p.parse_args()
    photos = sorted(a.folder.rglob("*.jpg"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=a.browser, args=["--no-sandbox"])
        page = browser.new_page()
        faults = []
        page.on("pageerror", lambda e: faults.append(str(e)))
        page.goto(a.url)

        def give(how, name, data):
            page.evaluate(how, [name, base64.b64encode(data).decode()])

        def expect(photo, how):
            page.locator("#classes tr td", has_text=photo.parent.name).first.wait_for(timeout=60000)
            first, *_, share = page.locator("#classes tr").first.inner_text().split("\t")
            if first.strip() != photo.parent.name or page.locator("#error").inner_text():
                raise SystemExit(f"{photo}, {how}: got the class {first}, want {photo.parent.name}")
            print(f"{how}: {first.strip()}, {share.strip()}; {page.locator('#times').inner_text()}")

        def refuse(name, data):
            give(DROP, name, data)
            page.locator("#error:not(:empty)").wait_for(timeout=60000)
            if page.locator("#classes tr").count():
                raise SystemExit(f"{name} has classes, want only an error")
            print(f"{name}: {page.locator('#error').inner_text()}")

        for photo in photos[:3]:
            give(DROP, photo.name, photo.read_bytes())
            expect(photo, "dropped")
        refuse("bad.jpg", b"no image")
        give(PASTE, photos[-1].name, photos[-1].read_bytes())
        expect(photos[-1], "pasted")
        refuse("large.jpg", bytes(11 << 20))
        page.set_input_files("#file", str(photos[-2]))
        expect(photos[-2], "chosen")
        browser.close()
        if faults:
            raise SystemExit(f"errors in the page: {faults}")


if __name__ == "__main__":
    main()
