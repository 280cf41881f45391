"""The numeric formats in which rows travel: a plain torch definition of each, which every engine repeats bit for bit.

| format     | bytes per row of H values                   | relative error            | use                        |
|------------|---------------------------------------------|---------------------------|----------------------------|
| `BF16`     | 2 H                                         | none                      | dispatch, combine          |
| `FP8Block` | H + 4 per block (float32) or 1 (UE8M0)      | 2^-4                      | dispatch                   |
| `LogFMT10` | 1.25 H to 2 H, and 4 per 128 channels       | half a step, under 2.2 %  | combine                    |
"""

from expertwire.formats.bf16 import BF16
from expertwire.formats.fp8 import FP8Block
from expertwire.formats.logfmt import LogFMT10
from expertwire.formats.wire import WireFormat

__all__ = ["BF16", "FP8Block", "LogFMT10", "WireFormat"]
