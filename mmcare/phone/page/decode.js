// From a network's outputs to classes, maps and boxes. Maps are (channels, height, width).

const CODERS = ['DeltaXYWHBBoxCoder', 'DistancePointBBoxCoder'];
const within = (value, low, high) => Math.min(Math.max(value, low), high);
export const sigmoid = (value) => 1 / (1 + Math.exp(-value));

/** Bring an output of the layout NHWC to NCHW. */
export function channelsFirst(values, { shape, layout }) {
  if (layout !== 'NHWC' || shape.length !== 4) return { values, shape };
  const [, height, width, channels] = shape;
  const moved = new Float32Array(values.length);
  for (let i = 0, from = 0; i < height * width; i++) {
    for (let c = 0; c < channels; c++) moved[c * height * width + i] = values[from++];
  }
  return { values: moved, shape: [1, channels, height, width] };
}

/** Give the probabilities of logits. */
export function softmax(logits) {
  const largest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = Float64Array.from(logits, (value) => Math.exp(value - largest));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}

/** Give the classes that can be the largest between places: few, so that maps are quick. */
function contenders(logits, classes, places) {
  const plane = logits.length / classes;
  const starts = Array.from({ length: classes }, (_, k) => k * plane);
  const values = starts.map((start) => places.map((place) => logits[start + place]));
  const bar = Math.max(...values.map((all) => Math.min(...all)));
  return [...values.keys()].filter((k) => Math.max(...values[k]) >= bar);
}

/**
 * Give the class of each pixel at a larger size, from logits at the stride of a head.
 *
 * One channel tells two classes apart: it is the second where its probability is above `least`.
 */
export function labelMap(values, [, channels, height, width], newHeight, newWidth, least = 0.3) {
  const [plane, classes] = [height * width, Math.max(channels, 2)];
  const logits = new Float32Array(classes * plane).fill(Math.log(least / (1 - least)));
  logits.set(values, logits.length - values.length);
  const [labels, able] = [new Uint16Array(newHeight * newWidth), []];
  for (let row = 0; row < newHeight; row++) {
    const y = within(((row + 0.5) * height) / newHeight - 0.5, 0, height - 1);
    const [top, down] = [Math.floor(y), y < height - 1 ? width : 0];
    for (let column = 0; column < newWidth; column++) {
      const x = within(((column + 0.5) * width) / newWidth - 0.5, 0, width - 1);
      const [left, along] = [Math.floor(x), x < width - 1 ? 1 : 0];
      const first = top * width + left;
      const places = [first, first + along, first + down, first + down + along];
      able[first] ??= contenders(logits, classes, places);
      let best = -Infinity;
      for (const k of able[first]) {
        const at = k * plane + first;
        const above = logits[at] + (logits[at + along] - logits[at]) * (x - left);
        const end = logits[at + down + along] - logits[at + down];
        const value = above + (logits[at + down] + end * (x - left) - above) * (y - top);
        if (value > best) [best, labels[row * newWidth + column]] = [value, k];
      }
    }
  }
  return labels;
}

/** Keep boxes that overlap no better one of the same class by more than a share; best first. */
export function suppress(boxes, share, most) {
  const kept = [];
  const area = ({ box: [x1, y1, x2, y2] }) => (x2 - x1) * (y2 - y1);
  for (const one of [...boxes].sort((a, b) => b.score - a.score)) {
    const hidden = kept.some((other) => {
      if (other.label !== one.label) return false;
      const width = Math.min(one.box[2], other.box[2]) - Math.max(one.box[0], other.box[0]);
      const height = Math.min(one.box[3], other.box[3]) - Math.max(one.box[1], other.box[1]);
      const common = Math.max(width, 0) * Math.max(height, 0);
      return common > share * (area(one) + area(other) - common);
    });
    if (!hidden && kept.push(one) === most) break;
  }
  return kept;
}

/** Decode the distances or deltas of one prior to x1, y1, x2, y2. */
function decodeBox(values, [x1, y1, x2, y2], coder) {
  if (coder.type === 'DistancePointBBoxCoder') {
    return [x1 - values[0], y1 - values[1], x1 + values[2], y1 + values[3]];
  }
  const [dx, dy, dw, dh] = values.map((value, i) => value * coder.stds[i] + coder.means[i]);
  const most = Math.abs(Math.log(coder.wh_ratio_clip));
  const [clamp, least] = coder.add_ctr_clamp ? [coder.ctr_clamp, -Infinity] : [Infinity, -most];
  const side = (low, high, shift, scale) => {
    const center = (low + high) / 2 + within(shift * (high - low), -clamp, clamp);
    const half = ((high - low) * Math.exp(within(scale, least, most))) / 2;
    return [center - half, center + half];
  };
  const [[left, right], [top, bottom]] = [side(x1, x2, dx, dw), side(y1, y2, dy, dh)];
  return [left, top, right, bottom];
}

/**
 * Decode a one-stage detector's boxes as mmdet does: {box: [x1, y1, x2, y2], score, label}.
 *
 * Maps are {values, shape} by the report's names. Boxes end with the image in the input.
 */
export function decodeBoxes(maps, decode, [imageWidth, imageHeight]) {
  const { coder, strides, prior_params: params, test_cfg: test } = decode;
  const { score_thr: least = 0.05, nms_pre: most = 1000, max_per_img: number = 100 } = test ?? {};
  if (!CODERS.includes(coder.type)) throw new Error(`this page does not decode a ${coder.type}`);
  const softens = decode.score_activation === 'softmax'; // with a last class for nothing
  const cut = softens ? least : Math.log(least / (1 - least));
  const found = [];
  strides.forEach((stride, level) => {
    const { values: scores, shape: [, channels, height, width] } = maps[`cls_score${level + 1}`];
    const deltas = maps[`bbox_pred${level + 1}`];
    const centerness = maps[`centerness${level + 1}`]?.values;
    const [cells, priors] = [height * width, deltas.shape[1] / 4];
    const classes = channels / priors;
    const candidates = [];
    const known = new Float32Array(scores);
    for (let one = 0; softens && one < priors * cells; one++) {
      const first = Math.floor(one / cells) * classes * cells + (one % cells);
      const all = Array.from({ length: classes }, (_, label) => scores[first + label * cells]);
      softmax(all).forEach((share, label) => (known[first + label * cells] = share));
    }
    for (let index = 0; index < known.length; index++) {
      if (!(known[index] > cut)) continue; // most of them
      const [channel, cell] = [Math.floor(index / cells), index % cells];
      const [prior, label] = [Math.floor(channel / classes), channel % classes];
      const score = softens ? known[index] : sigmoid(known[index]);
      if (!softens || label < classes - 1) candidates.push({ score, label, cell, prior });
    }
    candidates.sort((a, b) => b.score - a.score);
    for (const { score, label, cell, prior } of candidates.slice(0, most > 0 ? most : undefined)) {
      const [column, row] = [cell % width, Math.floor(cell / width)];
      const corner = [column, row].map((index) => (index + (params.offset ?? 0)) * stride);
      const anchor = params.base_anchors?.[level][prior] ?? [0, 0, 0, 0];
      const place = anchor.map((value, index) => value + corner[index % 2]);
      const values = [0, 1, 2, 3].map((side) => deltas.values[(prior * 4 + side) * cells + cell]);
      const box = decodeBox(values, place, coder).map((value, index) =>
        within(value, 0, index % 2 ? imageHeight : imageWidth));
      const factor = centerness ? sigmoid(centerness[prior * cells + cell]) : 1;
      found.push({ box, score: score * factor, label });
    }
  });
  const size = test?.min_bbox_size ?? -1;
  const large = ({ box }) => size < 0 || (box[2] - box[0] > size && box[3] - box[1] > size);
  return suppress(found.filter(large), test?.nms?.iou_threshold ?? 0.5, number);
}

/** Give the channel of a map that has the largest range, as a grey image. */
export function liveliest(values, [, channels, height, width]) {
  let best = { range: -1 };
  for (let channel = 0; channel < channels; channel++) {
    const plane = values.subarray(channel * height * width, (channel + 1) * height * width);
    const low = plane.reduce((a, b) => Math.min(a, b));
    const range = plane.reduce((a, b) => Math.max(a, b)) - low;
    if (range > best.range) best = { channel, plane, low, range };
  }
  const { channel, plane, low, range } = best;
  const grey = (value) => (255 * (value - low)) / (range || 1);
  const data = new Uint8ClampedArray(plane.length * 4);
  plane.forEach((value, i) => data.set([grey(value), grey(value), grey(value), 255], i * 4));
  return { channel, data, height, width };
}
