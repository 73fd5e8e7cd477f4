"""What `lowtide.head.cost` predicts beside what was measured on an H100: python benchmarks/head_cost.py.

Times behind other work, so that the host is hidden: benchmarks/results has none of these with another plan than the
planner's own. A run's clock differs from another's by some percent, so each shape's plans count relative to each other.
"""

from lowtide.head.cost import HOPPER, Schedule

# N, D, V: (rows, columns or 0 for chunks, bytes of a number of the sum, ms)
MEASURED = {
    (16384, 2048, 131072): [
        (2048, 0, 2, 39.23), (4096, 0, 2, 36.75), (6144, 0, 2, 36.37), (448, 0, 2, 49.33), (2048, 0, 4, 41.64),
        (2048, 9216, 2, 55.28), (2048, 8192, 2, 52.36), (2048, 18944, 2, 52.34),
    ],
    (8192, 2304, 256000): [
        (2048, 0, 2, 40.26), (4096, 0, 2, 42.18), (3584, 0, 2, 42.40), (1792, 0, 2, 44.90),
        (2048, 7680, 2, 62.33), (1664, 10240, 2, 60.28), (2048, 24064, 2, 57.03), (1664, 25600, 2, 58.99),
    ],
    (16384, 4096, 128256): [
        (2048, 0, 2, 76.14), (448, 0, 2, 98.46), (2048, 0, 4, 80.21), (2048, 3072, 2, 120.0),
    ],
    (32768, 768, 32000): [
        (4096, 0, 2, 7.14), (16896, 0, 2, 6.82), (11264, 0, 2, 6.86), (5632, 0, 2, 7.02), (2048, 0, 2, 7.95),
        (4096, 0, 4, 7.39), (2048, 13312, 2, 11.19), (4096, 5376, 2, 10.60), (2048, 29696, 2, 10.58),
        (4096, 10752, 2, 9.77),
    ],
    (8192, 4096, 151936): [
        (384, 0, 2, 60.5), (768, 0, 2, 47.5), (1408, 0, 2, 45.8), (2816, 0, 2, 43.9), (2048, 2816, 2, 77.0),
        (2048, 5632, 2, 65.5),
    ],
}  # fmt: skip


def main() -> None:
    """Print both, and their quotient over the shape's median quotient."""
    for (N, D, V), plans in MEASURED.items():
        head = Schedule(HOPPER, (N, D, V), True)
        rows = []
        for C, B, sum_bytes, ms in plans:
            seconds = head.in_blocks(C, B, 8192, sum_bytes) if B else head.in_chunks(C, sum_bytes)
            rows.append((C, B, sum_bytes, ms, 1e3 * seconds))
        usual = sorted(row[4] / row[3] for row in rows)[len(rows) // 2]
        print(f"{N} x {D} x {V}: bare {1e3 * head.bare:.1f} ms, predicted over measured {usual:.3f}")
        for C, B, sum_bytes, ms, predicted in rows:
            plan = f"{C} rows" + (f" x {B}" if B else "") + (", float32" if sum_bytes == 4 else "")
            print(f"  {plan:24s} measured {ms:7.2f}  predicted {predicted:7.2f}  relative {predicted / ms / usual:.3f}")


if __name__ == "__main__":
    main()
