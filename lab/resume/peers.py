"""The loaders that resume.py interrupts, each used as its documentation shows.

make_data writes 100 small images in every library's format. A peer has iterate(epoch), whose batches are lists of sample
numbers, state() and load(state): the loop, the epoch's number and the files of states are the program's, as in a training.
"""
import glob
import io
import os
import tarfile
import warnings

import numpy as np

SEED, BATCH = 1, 8
SHARDS = 4  # of every format that has shards


def jpeg(i, bad):
    """Return a JPEG of 16 x 16 pixels; a bad one ends in the middle."""
    from PIL import Image
    data = io.BytesIO()
    pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(data, 'JPEG', quality=90)
    return data.getvalue()[:40] if bad else data.getvalue()


def decode(data):
    from PIL import Image
    return np.asarray(Image.open(io.BytesIO(data)).convert('RGB'))


def write_tar(path, members):
    with tarfile.open(path, 'w') as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def make_data(name, folder, samples, bad):
    """Write the samples 0 to samples-1, of which those in bad are damaged, for one peer."""
    os.makedirs(folder)
    data = [jpeg(i, i in bad) for i in range(samples)]
    PEERS[name].write(folder, data)


def shards(data):
    """Deal numbered data to shards of consecutive samples."""
    size = -(-len(data) // SHARDS)
    numbered = list(enumerate(data))
    return [numbered[k:k + size] for k in range(0, len(data), size)]


class Peer:
    def __init__(self, spec):
        self.folder, self.workers = spec['folder'], spec['workers']
        self.rank, self.world = spec['rank'], spec['world']
        self.skip, self.even = spec['skip'], spec['even']
        self.open()

    def open(self):
        raise NotImplementedError

    def prepare(self, epoch):
        """What a training calls before each epoch."""

    def iterate(self, epoch):
        self.prepare(epoch)
        return ([int(i) for i in numbers] for numbers, _ in self.loader)

    def state(self):
        return self.loader.state_dict()

    def load(self, state):
        self.loader.load_state_dict(state)


class TorchData(Peer):
    """torchdata: a map-style dataset, StatefulDistributedSampler and StatefulDataLoader."""
    package = 'torchdata'
    imports = ['torch.distributed', 'torchdata.stateful_dataloader', 'torchdata.stateful_dataloader.sampler']

    @staticmethod
    def write(folder, data):
        for i, jpg in enumerate(data):
            with open(os.path.join(folder, f'{i:03}.jpg'), 'wb') as f:
                f.write(jpg)

    def open(self):
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
        files = Files(self.folder)
        self.sampler = StatefulDistributedSampler(files, self.world, self.rank, shuffle=True, seed=SEED)
        self.loader = StatefulDataLoader(files, batch_size=BATCH, sampler=self.sampler, num_workers=self.workers)

    def prepare(self, epoch):
        self.sampler.set_epoch(epoch)


class Files:
    def __init__(self, folder):
        self.paths = sorted(glob.glob(os.path.join(folder, '*.jpg')))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        with open(self.paths[i], 'rb') as f:
            return i, decode(f.read())


class WebDataset(Peer):
    """webdataset in torchdata's StatefulDataLoader. webdataset itself has no state."""
    package = 'webdataset'
    imports = ['torch.distributed', 'torchdata.stateful_dataloader', 'webdataset']

    @staticmethod
    def write(folder, data):
        for k, part in enumerate(shards(data)):
            write_tar(os.path.join(folder, f'{k}.tar'),
                      [m for i, jpg in part for m in ((f'{i:03}.jpg', jpg), (f'{i:03}.cls', str(i).encode()))])

    def open(self):
        import webdataset
        from torchdata.stateful_dataloader import StatefulDataLoader
        handler = webdataset.ignore_and_continue if self.skip else webdataset.reraise_exception
        urls = sorted(glob.glob(os.path.join(self.folder, '*.tar')))
        self.shuffles = [webdataset.detshuffle(SHARDS, seed=SEED), webdataset.detshuffle(16, seed=SEED)]
        dataset = webdataset.DataPipeline(
            webdataset.SimpleShardList(urls), webdataset.split_by_node, webdataset.split_by_worker, self.shuffles[0],
            webdataset.tarfile_to_samples(handler=handler), self.shuffles[1], webdataset.decode('rgb8', handler=handler),
            webdataset.to_tuple('cls', 'jpg'))
        self.loader = StatefulDataLoader(dataset, batch_size=BATCH, num_workers=self.workers)

    def prepare(self, epoch):
        for shuffle in self.shuffles:
            shuffle.epoch = epoch - 1  # which the shuffle increments


class Streaming(Peer):
    """MosaicML streaming: StreamingDataset and StreamingDataLoader."""
    package = 'mosaicml-streaming'
    imports = ['torch.distributed', 'streaming']

    @staticmethod
    def write(folder, data):
        from streaming import MDSWriter
        limit = sum(len(d) for d in data) // SHARDS + 600
        with MDSWriter(out=folder, columns={'i': 'int', 'jpg': 'bytes'}, size_limit=max(limit, 2048)) as out:
            for i, jpg in enumerate(data):
                out.write({'i': i, 'jpg': jpg})

    def open(self):
        from streaming import StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory
        clean_stale_shared_memory()  # after a kill, says the documentation

        class Images(StreamingDataset):
            def get_item(self, index, retry=7):
                item = super().get_item(index, retry)
                return item['i'], decode(item['jpg'])
        dataset = Images(local=self.folder, batch_size=BATCH, shuffle=True, shuffle_seed=SEED)
        self.loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=self.workers)


class LitData(Peer):
    """litData: StreamingDataset and StreamingDataLoader."""
    package = 'litdata'
    imports = ['torch.distributed', 'litdata']

    @staticmethod
    def write(folder, data):
        from litdata.streaming.writer import BinaryWriter
        writer = BinaryWriter(folder, chunk_size=-(-len(data) // SHARDS))
        for i, jpg in enumerate(data):
            writer[i] = {'i': i, 'jpg': jpg}
        writer.done()
        writer.merge(num_workers=1)

    def open(self):
        from litdata import StreamingDataLoader, StreamingDataset

        class Images(StreamingDataset):
            def __getitem__(self, index):
                item = super().__getitem__(index)
                return item['i'], decode(item['jpg'])
        # drop_last is true by default on several ranks, and a state does not fit another value of it
        dataset = Images(self.folder, shuffle=True, seed=SEED, drop_last=None if self.even else False)
        self.loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=self.workers)


class Datasets(Peer):
    """Hugging Face datasets: a streamed dataset in torchdata's StatefulDataLoader, as its page Stream shows."""
    package = 'datasets'
    imports = ['torch.distributed', 'torchdata.stateful_dataloader', 'datasets.distributed', 'pyarrow.parquet']
    buffer = 1  # samples of the shuffle buffer

    @staticmethod
    def write(folder, data):
        import datasets
        datasets.disable_progress_bars()
        features = datasets.Features({'i': datasets.Value('int64'), 'image': datasets.Image()})
        for k, part in enumerate(shards(data)):
            rows = {'i': [i for i, _ in part], 'image': [{'bytes': jpg, 'path': None} for _, jpg in part]}
            datasets.Dataset.from_dict(rows, features=features).to_parquet(os.path.join(folder, f'{k}.parquet'))

    def open(self):
        import datasets
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader
        files = sorted(glob.glob(os.path.join(self.folder, '*.parquet')))
        rows = datasets.load_dataset('parquet', data_files=files, split='train', streaming=True)
        rows = rows.shuffle(seed=SEED, buffer_size=self.buffer)
        self.rows = split_dataset_by_node(rows, rank=self.rank, world_size=self.world) if self.world > 1 else rows
        self.loader = StatefulDataLoader(self.rows, batch_size=BATCH, num_workers=self.workers,
                                         collate_fn=lambda rows: ([r['i'] for r in rows], [np.asarray(r['image']) for r in rows]))

    def prepare(self, epoch):
        self.rows.set_epoch(epoch)


class DatasetsBuffer(Datasets):
    """The same with a shuffle buffer of 16 samples, which the page says is lost."""
    buffer = 16


class DALI(Peer):
    """NVIDIA DALI on the CPU: readers.file, DALIGenericIterator, checkpoints. Workers are threads."""
    package = 'nvidia-dali-cuda130'
    imports = ['nvidia.dali.fn', 'nvidia.dali.plugin.pytorch']

    write = TorchData.write

    def open(self, checkpoint=None):
        from nvidia.dali import fn, pipeline_def
        from nvidia.dali.plugin.base_iterator import LastBatchPolicy
        from nvidia.dali.plugin.pytorch import DALIGenericIterator
        files = sorted(glob.glob(os.path.join(self.folder, '*.jpg')))

        @pipeline_def
        def pipeline():
            jpg, number = fn.readers.file(name='reader', files=files, labels=list(range(len(files))), random_shuffle=True,
                                          shard_id=self.rank, num_shards=self.world, pad_last_batch=True)
            return fn.decoders.image(jpg, device='cpu'), number
        pipe = pipeline(batch_size=BATCH, num_threads=max(self.workers, 1), device_id=None, seed=SEED, enable_checkpointing=True,
                        checkpoint=checkpoint)
        self.loader = DALIGenericIterator([pipe], ['image', 'number'], reader_name='reader', auto_reset=True,
                                          last_batch_policy=LastBatchPolicy.PARTIAL)

    def iterate(self, epoch):
        return ([int(i) for i in batch[0]['number'].flatten()] for batch in self.loader)

    def state(self):
        return self.loader.checkpoints()[0]

    def load(self, state):
        self.open(state)


PEERS = {'torchdata': TorchData, 'webdataset': WebDataset, 'streaming': Streaming, 'litdata': LitData,
         'datasets': Datasets, 'datasets-buffer': DatasetsBuffer, 'dali': DALI}
warnings.filterwarnings('ignore')
