# SPDX-License-Identifier: Apache-2.0
"""Positions of pictures on a contact sheet."""

from PIL import Image

from verl.cli.data_report.report import contact_sheet, save_sheet

RED, BLUE = (255, 0, 0), (0, 0, 255)


def test_the_ninth_picture_begins_a_second_line():
    tiles = [(Image.new("RGB", (10, 10), RED), "")] * 8 + [(Image.new("L", (10, 10), 0), "")]

    sheet = contact_sheet(tiles)

    # A tile of 192, 16 below it for its label, 4 around: columns begin every 196, lines every 212.
    assert sheet.size == (4 + 8 * 196, 4 + 2 * 212)
    assert [sheet.getpixel((4 + 196 * column, 4)) for column in range(8)] == [RED] * 8
    assert sheet.getpixel((4, 4 + 212)) == (0, 0, 0)
    assert sheet.getpixel((4 + 196, 4 + 212)) == (255, 255, 255)


def test_a_wide_picture_keeps_its_shape():
    sheet = contact_sheet([(Image.new("RGB", (20, 10), BLUE), "")])

    assert sheet.getpixel((4 + 191, 4 + 95)) == BLUE  # 192 x 96
    assert sheet.getpixel((4, 4 + 97)) == (255, 255, 255)


def test_a_sheet_is_written_completely(tmp_path):
    path = tmp_path / "new" / "sheet.png"

    save_sheet([(Image.new("RGB", (2, 2), RED), "two")], path)

    assert [file.name for file in path.parent.iterdir()] == ["sheet.png"]
    with Image.open(path) as sheet:
        assert sheet.size == (200, 216)
