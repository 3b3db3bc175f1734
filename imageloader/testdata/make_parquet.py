"""Writes testdata/parquet: one set of rows by several writers, and expected.json: what Hugging Face's datasets reads.
boxes.json has the boxes that it reads, each with four numbers and the class.

    pip install datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 polars==2.1.0 duckdb==2.0.1

The images are no real ones: a PNG's signature and a text. Of expected.json, each row has the path, the labels as
text, and the CRC-32 of the image, or null where there is none.
"""
import json, os, zlib

import datasets, duckdb, pandas, polars, pyarrow as pa, pyarrow.parquet as pq

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "parquet")
os.makedirs(OUT, exist_ok=True)
PNG = b"\x89PNG\r\n\x1a\n"
CLASSES = ["owl", "cat", "café"]  # not in the order of their bytes
IMAGES = [PNG + f"{i} ".encode() * (1 + 40 * (i % 2)) for i in range(14)]
LABELS = [i % 3 for i in range(14)]
NAMES = [CLASSES[i] for i in LABELS]
PATHS = [f"{name}/{i}.png" for i, name in enumerate(NAMES)]
PLAIN = pa.table({"image": pa.array(IMAGES, pa.binary()), "label": NAMES})
made = []


def path(name):
    made.append(name)
    return os.path.join(OUT, name + ".parquet")


def write(name, table, **options):
    pq.write_table(table, path(name), **options)


features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=CLASSES)})
structs = [{"bytes": b, "path": p} for b, p in zip(IMAGES, PATHS)]
datasets.Dataset.from_dict({"image": structs, "label": LABELS}, features=features).to_parquet(path("datasets"), batch_size=5)

lists = datasets.Features({"image": datasets.Image(decode=False), "labels": datasets.Sequence(datasets.ClassLabel(names=CLASSES))})
datasets.Dataset.from_dict({"image": structs, "labels": [list(range(i % 4)) for i in range(14)]},
                           features=lists).to_parquet(path("datasets-lists"), batch_size=5)

two = datasets.Features({"coarse_label": datasets.ClassLabel(names=["bird", "beast"]), "img": datasets.Image(decode=False),
                         "fine_label": datasets.ClassLabel(names=CLASSES)})
datasets.Dataset.from_dict({"img": structs, "fine_label": LABELS, "coarse_label": [min(i, 1) for i in LABELS]},
                           features=two).to_parquet(path("datasets-two"))

schema = pq.read_schema(os.path.join(OUT, "datasets.parquet"))
absent = [{**s, "bytes": None} if i == 3 else s for i, s in enumerate(structs)]
missing = [-1 if i == 7 else None if i == 9 else x for i, x in enumerate(LABELS)]
write("datasets-absent", pa.Table.from_pydict({"image": absent, "label": missing}, schema=schema), row_group_size=4)

pandas.DataFrame({"image": IMAGES, "label": NAMES}).to_parquet(path("pandas"))
pandas.DataFrame({"image": IMAGES, "label": pandas.Categorical(NAMES)}).to_parquet(path("pandas-categorical"), compression="gzip")
polars.DataFrame({"image": IMAGES, "label": LABELS}).write_parquet(path("polars"), row_group_size=6)
duckdb.register("plain", PLAIN)
duckdb.sql(f"copy plain to '{path('duckdb')}' (format parquet, parquet_version v2, compression zstd)")
duckdb.sql(f"copy plain to '{path('duckdb-v1')}' (format parquet)")
for codec in "none", "snappy", "gzip", "zstd":
    for version in "1.0", "2.0":
        write(f"pages-{codec}-{version[0]}", PLAIN, compression=codec, data_page_version=version, use_dictionary=["label"],
              data_page_size=300, write_batch_size=2, write_page_checksum=True)
numbers = PLAIN.set_column(1, "label", pa.array(LABELS, pa.int32()))
write("delta", PLAIN, compression="snappy", use_dictionary=False,
      column_encoding={"image": "DELTA_LENGTH_BYTE_ARRAY", "label": "DELTA_BYTE_ARRAY"})
write("delta-none", numbers, compression="none", use_dictionary=False,
      column_encoding={"image": "DELTA_LENGTH_BYTE_ARRAY", "label": "DELTA_BINARY_PACKED"}, data_page_version="2.0")
write("dictionary-none", PLAIN, compression="none")
write("plain-numbers", numbers, compression="zstd", use_dictionary=False)
flags = (PLAIN.drop(["label"]).append_column("bird", pa.array([i == 0 for i in LABELS]))
         .append_column("round", pa.array([i % 2 for i in range(14)])))
write("flags", flags)
write("flags-2", flags, compression="none", data_page_version="2.0")  # its bool values are run-length encoded

expected = {}
for name in made:
    d = datasets.load_dataset("parquet", data_files=os.path.join(OUT, name + ".parquet"), split="train", cache_dir="/tmp/make_parquet")
    rows = []
    for column, kind in list(d.features.items()):
        if isinstance(kind, datasets.Image):
            d = d.cast_column(column, datasets.Image(decode=False))
    for row in d:
        image = row.pop("image", None) or row.pop("img", None)
        image = image if isinstance(image, dict) else {"bytes": image, "path": ""}
        labels = []
        for column, value in row.items():
            kind = d.features[column]
            kind = getattr(kind, "feature", kind)
            for one in value if isinstance(value, list) else [value]:
                if name.startswith("flags"):
                    labels += [column] if one else []
                elif isinstance(kind, datasets.ClassLabel):
                    labels += [kind.int2str(one)] if one is not None and one >= 0 else []
                else:
                    labels.append(str(one))
        crc = None if image["bytes"] is None else zlib.crc32(image["bytes"])
        rows.append([image["path"] or "", labels, crc])
    expected[name] = rows
write("lz4", PLAIN, compression="lz4")
with open(os.path.join(OUT, "expected.json"), "w") as f:
    json.dump(expected, f, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    f.write("\n")

# Boxes as in cppe-5: a struct of lists, or a list of structs.
ITEMS = [[([4 * k + 0.5, 2 * k, 10.25, 8 + i], (i + k) % 3) for k in range(i % 4)] for i in range(14)]
LABEL, NUMBERS = datasets.ClassLabel(names=CLASSES), datasets.List(datasets.Value("float32"), length=4)
structs = [{**s, "path": "image.png" if i % 3 else None} for i, s in enumerate(structs)]
boxed = {}
for name, objects, of in (
    ("boxes-lists", {"id": datasets.List(datasets.Value("int64")), "bbox": datasets.List(NUMBERS), "category": datasets.List(LABEL)},
     lambda row: {"id": list(range(len(row))), "bbox": [b for b, _ in row], "category": [c for _, c in row]}),
    ("boxes-structs", datasets.List({"id": datasets.Value("int64"), "category": LABEL, "bbox": NUMBERS}),
     lambda row: [{"id": k, "bbox": b, "category": c} for k, (b, c) in enumerate(row)])):
    kinds = datasets.Features({"image_id": datasets.Value("int64"), "image": datasets.Image(decode=False), "objects": objects})
    datasets.Dataset.from_dict({"image_id": range(14), "image": structs, "objects": [of(row) for row in ITEMS]},
                               features=kinds).to_parquet(os.path.join(OUT, name + ".parquet"), batch_size=5)
    boxed[name] = []
    for row in datasets.load_dataset("parquet", data_files=os.path.join(OUT, name + ".parquet"), split="train"):
        o = row["objects"]
        if isinstance(o, list):
            o = {key: [item[key] for item in o] for key in ("bbox", "category")}
        boxed[name].append([[*b, CLASSES[c]] for b, c in zip(o["bbox"], o["category"])])
# Rows that datasets writes and that have no boxes: row 1 of each file is wrong.
os.makedirs(os.path.join(OUT, "wrong"), exist_ok=True)
GOOD = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
for name, boxes, labels in (
    ("sizes", [[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0]], [0, 1]), ("null-box", [GOOD[0], None, GOOD[1]], [0, 1]),
    ("empty-box", [[], *GOOD], [0, 1]), ("null-number", [[0.0, None, 2.0, 3.0, 4.0], GOOD[0]], [0, 1]),
    ("null-label", GOOD, [0, None, 1]), ("null-both", [GOOD[0], None], [0, None]), ("few-labels", GOOD, [0])):
    for kind in "lists", "structs":
        if kind == "structs" and len(boxes) != len(labels):
            continue
        pair = pa.list_(pa.list_(pa.float32())), pa.list_(pa.int64())
        objects = [{"bbox": b, "category": c} for b, c in ((GOOD, [1, 0]), (boxes, labels))]
        of = pa.struct([("bbox", pair[0]), ("category", pair[1])])
        if kind == "structs":
            objects = [[{"bbox": b, "category": c} for b, c in zip(o["bbox"], o["category"])] for o in objects]
            of = pa.list_(pa.struct([("bbox", pair[0].value_type), ("category", pa.int64())]))
        pq.write_table(pa.table({"image": pa.array(IMAGES[:2], pa.binary()), "objects": pa.array(objects, of)}),
                       os.path.join(OUT, "wrong", f"{name}-{kind}.parquet"))

with open(os.path.join(OUT, "boxes.json"), "w") as f:
    json.dump(boxed, f, ensure_ascii=False, separators=(",", ":"))
