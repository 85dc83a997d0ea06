// What outputs mean, drawn: boxes and masks, classes, a map of classes, or maps of numbers.

import {
  decodeBoxes, labelMap, liveliest, logitsOf, pasteMask, readBoxes, sigmoid, softmax,
} from './decode.js';

const LARGEST = 1024; // pixels of the longer side of a picture
const ACTIVATIONS = { softmax, sigmoid: (values) => values.map(sigmoid) };
const $ = (id) => document.getElementById(id);
const scratch = new OffscreenCanvas(1, 1); // one, since phones have memory for few

/** Make an element with a content, a text or several elements, and attributes. */
export function make(tag, content = '', attributes = {}) {
  const element = document.createElement(tag);
  element.append(...[content].flat());
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  return element;
}

/** Make RGBA pixels an image that can be drawn. */
function drawable({ data, width, height }) {
  [scratch.width, scratch.height] = [width, height];
  scratch.getContext('2d').putImageData(new ImageData(data, width, height), 0, 0);
  return scratch;
}

/** Draw the photo as large as it is shown, with room below it: a share of its height. */
function drawPhoto(image, room = 0) {
  const canvas = $('seen');
  const shown = [$('legend').clientWidth, 0.75 * innerHeight]
    .map((side) => Math.min(side * devicePixelRatio, LARGEST));
  const scale = Math.min(shown[0] / image.width, shown[1] / image.height);
  const [width, height] = [image.width, image.height].map((side) => Math.round(side * scale));
  [canvas.width, canvas.height, canvas.hidden] = [width, Math.round(height * (1 + room)), false];
  const context = canvas.getContext('2d');
  context.drawImage(drawable(image), 0, 0, width, height);
  context.imageSmoothingEnabled = false; // of what follows
  return { context, width, height };
}

/** List below the picture: [words, colour, share]. */
function legend(lines) {
  $('legend').replaceChildren(...lines.map(([words, colour, share]) => {
    const style = colour ? `--swatch: rgb(${colour.join(' ')})` : '';
    const meter = share === undefined ? [] : make('meter', '', { value: share });
    return make('li', [words, meter].flat(), { style });
  }));
}

/** Show maps {values, shape} by their names, of an image that became a small one in an input. */
export function show({ about, shape: input }, maps, image, small) {
  const { part, decode, classes, palette, activation, outputs: [{ kind }] } = about;
  const [{ values, shape }] = Object.values(maps);
  const name = (label) => classes?.[label] ?? `class ${label}`;
  const own = (label) => [61, 103, 149].map((step) => 30 + ((step * (label + 1)) % 200));
  const colour = (label) => palette?.[label]?.map(Number) ?? own(label); // texts would be CSS
  const line = ([label, share]) => [`${name(label)}: ${(100 * share).toFixed(1)} %`, colour(label)];
  if (part !== 'model') return drawMaps(Object.entries(maps), image, small, input);
  if (decode || kind === 'boxes') {
    const boxes = decode ? decodeBoxes(maps, decode, small) : readBoxes(maps, about, small);
    $('least').hidden = false;
    const least = about.test_cfg?.mask_thr_binary ?? 0.5;
    $('threshold').oninput = () => drawBoxes(boxes, image, small, name, colour, least);
    return $('threshold').oninput();
  }
  if (shape.length > 2) {
    const { activation: kindOf } = about.outputs[0];
    const logits = kind === 'probabilities' ? logitsOf(values, kindOf) : values;
    const labels = kind === 'labels' ? values
      : labelMap(logits, shape, ...input, about.threshold, about.align_corners);
    const shares = drawMap(labels, image, small, input[1], colour);
    return legend(shares.sort((a, b) => b[1] - a[1]).map(line));
  }
  const shares = kind ? values : ACTIVATIONS[activation]?.(values); // or numbers that are no shares
  const best = [...(shares ?? values).entries()].sort((a, b) => b[1] - a[1]).slice(0, 5);
  drawPhoto(small);
  legend(best.map(([label, value]) => shares ? [...line([label, value]), value]
    : [`${name(label)}: ${value.toPrecision(3)}`, colour(label)]));
}

/** Draw boxes with names, and masks, over the photo: those with at least the chosen score. */
function drawBoxes(boxes, image, small, name, colour, least) {
  const { context, width, height } = drawPhoto(image);
  const certain = boxes.filter(({ score }) => score >= $('threshold').valueAsNumber);
  for (const { mask, label } of certain) {
    if (!mask) continue;
    const data = new Uint8ClampedArray(small.width * small.height * 4);
    pasteMask(mask, small, least).forEach((value, i) => {
      if (value) data.set([...colour(label), 140], i * 4);
    });
    context.drawImage(drawable({ ...small, data }), 0, 0, width, height);
  }
  context.lineWidth = Math.max(2, width / 250);
  context.font = `${Math.max(12, width / 40)}px system-ui`;
  for (const { box, score, label } of certain) {
    const [x1, y1, x2, y2] = box.map((side) => (side * width) / small.width);
    const words = `${name(label)} ${score.toFixed(2)}`;
    const { width: long, fontBoundingBoxAscent: above } = context.measureText(words);
    context.strokeStyle = context.fillStyle = `rgb(${colour(label).join(' ')})`;
    context.strokeRect(x1, y1, x2 - x1, y2 - y1);
    context.fillRect(x1, Math.max(y1 - above - 4, 0), long + 6, above + 4);
    context.fillStyle = 'white';
    context.fillText(words, x1 + 3, Math.max(y1 - 4, above));
  }
  const labels = certain.map(({ label }) => label);
  const lines = [...new Set(labels)].map((label) =>
    [`${name(label)}: ${labels.filter((one) => one === label).length}`, colour(label)]);
  legend(lines.length ? lines : [['no box has such a score']]);
}

/** Draw a map of classes over the photo, and give the share of each class. */
function drawMap(labels, image, small, columns, colour) {
  const { context, width, height } = drawPhoto(image);
  const data = new Uint8ClampedArray(small.width * small.height * 4);
  const [pixels, counts, packed] = [new Uint32Array(data.buffer), [], []];
  for (let i = 0; i < pixels.length; i++) {
    const [row, column] = [Math.floor(i / small.width), i % small.width];
    const label = labels[(row + small.top) * columns + column + small.left];
    packed[label] ??= new Uint32Array(Uint8Array.from([...colour(label), 140]).buffer)[0];
    pixels[i] = packed[label];
    counts[label] = (counts[label] ?? 0) + 1;
  }
  context.drawImage(drawable({ ...small, data }), 0, 0, width, height);
  return Object.entries(counts).map(([label, count]) => [Number(label), count / pixels.length]);
}

/** Draw below the photo one channel of each map. */
function drawMaps(maps, image, small, [inHeight, inWidth]) {
  const { context, width, height } = drawPhoto(image, Math.ceil(maps.length / 2) / 2);
  legend(maps.map(([name, { values, shape }], index) => {
    const { channel, data, width: columns, height: rows } = liveliest(values, shape);
    const part = [(columns * small.width) / inWidth, (rows * small.height) / inHeight];
    const place = [(index % 2) * (width / 2), height + Math.floor(index / 2) * (height / 2)];
    const map = drawable({ data, width: columns, height: rows });
    context.drawImage(map, 0, 0, ...part, ...place, width / 2, height / 2);
    return [`${name}: channel ${channel} of ${shape[1]}, ${rows}x${columns}`];
  }));
}
