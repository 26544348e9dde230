"""What it costs to quantize one part of a model (one role of one layer) and nothing else, estimated here, without a server.

    parts      checkpoint, schemes -> the parts, their bytes in each scheme (from plans), and the recipe of any mix of them
    texts      the tokens it is measured on
    rounded    a part's weights as a scheme stores them, by our own kernels or a calibration; activations as its kernels round
               them; proxy `weights`: relative squared error of the weights; reads the checkpoint, runs nothing, any size
    direct     proxy `kl`: the divergence itself, part by part, by the whole model in transformers
    layered    proxies `kl` and `hidden`, one layer in memory at a time, for a model that does not fit

In: a checkpoint, schemes, texts. Out: numbers for each part; the record is put together by the command, which also serves. May
import calibration, engine, plan and everything below them.
"""
