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

/** Give logits of the probabilities of classes, up to a number that all classes share. */
export function logitsOf(probabilities, activation) {
  const odds = activation === 'sigmoid' ? (p) => p / Math.max(1 - p, 1e-7) : (p) => p;
  return Float32Array.from(probabilities, (p) => Math.log(Math.max(odds(p), 1e-30)));
}

// One channel tells two classes apart: it is the second where its probability is above `least`.
/** Give the class of each pixel at a larger size, from logits at the stride of a head. */
export function labelMap(
  logits, [, channels, height, width], newHeight, newWidth, least = 0.3, aligned = false,
) {
  const labels = new Uint16Array(newHeight * newWidth);
  const lowest = channels > 1 ? -Infinity : Math.log(least / (1 - least));
  const [best, line] = [new Float32Array(labels.length).fill(lowest), new Float32Array(width)];
  const place = (i, from, to) => aligned ? (i * (from - 1)) / Math.max(to - 1, 1)
    : within(((i + 0.5) * from) / to - 0.5, 0, from - 1);
  const x = Float32Array.from({ length: newWidth }, (_, i) => place(i, width, newWidth));
  for (let k = 0; k < channels; k++) {
    for (let row = 0; row < newHeight; row++) {
      const y = place(row, height, newHeight);
      const start = (k * height + Math.floor(y)) * width;
      const down = y < height - 1 ? width : 0;
      for (let i = 0; i < width; i++) {
        line[i] = logits[start + i] + (logits[start + down + i] - logits[start + i]) * (y % 1);
      }
      for (let column = 0, to = row * newWidth; column < newWidth; column++, to++) {
        const left = Math.floor(x[column]);
        const right = Math.min(left + 1, width - 1);
        const value = line[left] + (line[right] - line[left]) * (x[column] - left);
        if (value > best[to]) [best[to], labels[to]] = [value, channels > 1 ? k : 1];
      }
    }
  }
  return labels;
}

/**
 * Keep boxes that overlap no better one of the same class by more than a share; best first. The
 * result must equal that of `nms` in mmcare_runtime/results.py; tests/test_phone.py compares them.
 */
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

/** Move boxes from an input to the image in it, clip them, and keep the best as mmdet does. */
function keepBest(boxes, test, { width, height, top, left }) {
  const move = (value, i) => value - (i % 2 ? top : left);
  const clips = test.clip_border ?? true;
  const clip = (value, i) => (clips ? within(value, 0, i % 2 ? height : width) : value);
  const moved = boxes.map(({ mask, ...one }) => {
    const whole = one.box.map(move); // which a mask covers
    return { ...one, box: whole.map(clip), ...(mask && { mask: { ...mask, box: whole } }) };
  });
  const size = test.min_bbox_size ?? -1;
  const large = ({ box }) => size < 0 || (box[2] - box[0] > size && box[3] - box[1] > size);
  return suppress(moved.filter(large), test.nms.iou_threshold, test.max_per_img);
}

/** Decode boxes as mmdet does, {box: [x1, y1, x2, y2], score, label}, from maps by their names. */
export function decodeBoxes(maps, decode, image) {
  const { coder, strides, prior_params: params, test_cfg: test } = decode;
  const { score_thr: least = 0, nms_pre: most = -1 } = test;
  if (!CODERS.includes(coder.type)) throw new Error(`this page does not decode a ${coder.type}`);
  const softens = decode.score_activation === 'softmax'; // with a last class for nothing
  const cut = softens ? least : Math.log(least / (1 - least));
  const found = [];
  strides.forEach((stride, level) => {
    const { values: scores, shape: [, channels, height, width] } = maps[`cls_score${level + 1}`];
    const deltas = maps[`bbox_pred${level + 1}`];
    const factors = ['centerness', 'iou_pred', 'objectness']; // of scores, in mmdet's heads
    const centerness = factors.map((name) => maps[name + (level + 1)]).find(Boolean)?.values;
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
      const box = decodeBox(values, place, coder);
      const factor = centerness ? sigmoid(centerness[prior * cells + cell]) : 1;
      found.push({ box, score: score * factor, label });
    }
  });
  return keepBest(found, test, image);
}

/** Read the boxes in a file's results, as decodeBoxes gives them; with masks, if there are any. */
export function readBoxes(maps, { outputs, test_cfg: test }, image) {
  const [boxes, scores, labels] = outputs.map(({ name }) => maps[name].values);
  const [{ box_format, scale }, rows] = [outputs[0], boxes.length / 4];
  const classes = scores.length / rows;
  const masks = maps[outputs.find(({ kind }) => kind === 'masks')?.name];
  const found = [];
  scores.forEach((score, index) => {
    if (!(score > (test.score_thr ?? 0))) return;
    const row = Math.floor(index / classes);
    let [a, b, c, d] = boxes.slice(row * 4, row * 4 + 4);
    if (box_format === 'cxcywh') [a, b, c, d] = [a - c / 2, b - d / 2, a + c / 2, b + d / 2];
    const box = [a, b, c, d].map((side, i) => side * scale[i]);
    found.push({ box, score, label: labels ? labels[row] : index % classes });
    if (masks) {
      const [, , height, width] = masks.shape;
      const values = masks.values.subarray(row * height * width, (row + 1) * height * width);
      found.at(-1).mask = { values, height, width };
    }
  });
  return keepBest(found, test, image);
}

/** Tell which pixels of an image belong to an object, as mmdet does: a byte for each, 1 or 0. */
export function pasteMask({ values, height: rows, width: columns, box }, { width, height }, least) {
  const [[x1, y1, x2, y2], pixels] = [box, new Uint8Array(width * height)];
  if (!(x2 > x1 && y2 > y1)) return pixels;
  const inside = (row, column) => row >= 0 && row < rows && column >= 0 && column < columns;
  const read = (row, column) => (inside(row, column) ? values[row * columns + column] : 0);
  const [first, last] = [Math.max(Math.floor(x1) - 1, 0), Math.min(Math.ceil(x2) + 1, width)];
  for (let i = Math.max(Math.floor(y1) - 1, 0); i < Math.min(Math.ceil(y2) + 1, height); i++) {
    const y = ((i + 0.5 - y1) * rows) / (y2 - y1) - 0.5;
    const [row, down] = [Math.floor(y), y - Math.floor(y)];
    for (let j = first; j < last; j++) {
      const x = ((j + 0.5 - x1) * columns) / (x2 - x1) - 0.5;
      const [column, right] = [Math.floor(x), x - Math.floor(x)];
      const [above, below] = [row, row + 1].map((k) =>
        read(k, column) * (1 - right) + read(k, column + 1) * right);
      if (above * (1 - down) + below * down >= least) pixels[i * width + j] = 1;
    }
  }
  return pixels;
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
