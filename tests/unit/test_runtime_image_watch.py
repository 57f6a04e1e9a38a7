"""ImageWatch: a pipe's end is the server's, and it is seen at once."""

import os

from sandboxd.runtime.image_watch import ImageWatch


def test_all_live_until_one_write_end_is_closed():
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
    watch = ImageWatch([read for read, _ in pipes])
    assert watch.all_alive()
    os.close(pipes[1][1])
    assert not watch.all_alive()
    watch.close()
    assert watch.all_alive()  # nothing is watched any more
    for i in (0, 2):
        os.close(pipes[i][1])


def test_no_images_is_alive():
    assert ImageWatch([]).all_alive()
