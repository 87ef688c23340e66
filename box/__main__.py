"""The commands of the one file.

`make dist` puts this file at the top of the one file, where Python begins. In a
checkout, run `python3 -m box`.
"""

import sys

import waker

if __name__ == "__main__":
    sys.exit(waker.main(sys.argv))
