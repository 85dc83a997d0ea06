// Prepare a picture, and read the boxes of a decoded detector, by a file's description: what
// mmcare_runtime does in Python. docs/description.md explains the keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace mmcare {

using nlohmann::json;

struct Place {  // of a picture in the image, in pixels
  int top, left, height, width;
};

struct Box {
  float x1, y1, x2, y2, score;
  int label;
};

inline json parse(const std::string& text) {
  const json description = json::parse(text);
  const json& first = description.at("outputs").at(0);
  if (description.at("part") != "model" || first.value("kind", "") != "boxes")
    throw std::runtime_error("the file is not of a detector, --part model --outputs decoded");
  const json loader = description.at("inputs").at(0).value("loader", json());
  const std::map<std::string, json> known = {
      {"bits", 8}, {"color_type", "color"}, {"imdecode_backend", "cv2"}, {"to_float32", false}};
  for (const auto& [key, value] : known)
    if (!loader.is_null() && !loader.at(key).is_null() && loader.at(key) != value)
      throw std::runtime_error("only colours of 8 bits, read by cv2, are prepared here");
  const json& resize = description.at("inputs").at(0).at("resize");
  if (!resize.is_null() && (!resize.at("shorter").is_null() || !resize.value("share", json()).is_null() ||
                            resize.at("backend") != "cv2"))
    throw std::runtime_error("only pictures that are resized to fit, by cv2, are prepared here");
  return description;
}

// Resize, normalize and pad a picture in BGR to planes (C, H, W) of floats.
inline std::vector<float> prepare(const cv::Mat& picture, const json& description, Place& place) {
  const json& image = description.at("inputs").at(0);
  const int height = description.at("shape").at(0), width = description.at("shape").at(1);
  double ratio = std::min(double(height) / picture.rows, double(width) / picture.cols);
  std::string interpolation = "bilinear";
  if (image.at("resize").is_null())
    ratio = std::min(ratio, 1.0);
  else
    interpolation = image["resize"].value("interpolation", interpolation);
  const std::map<std::string, int> codes = {{"nearest", cv::INTER_NEAREST},
                                            {"bilinear", cv::INTER_LINEAR},
                                            {"bicubic", cv::INTER_CUBIC},
                                            {"area", cv::INTER_AREA},
                                            {"lanczos", cv::INTER_LANCZOS4}};
  place.height = std::max(1, int(std::nearbyint(picture.rows * ratio)));
  place.width = std::max(1, int(std::nearbyint(picture.cols * ratio)));
  const bool is_centered = image.value("letterbox", "top-left") == "center";
  place.top = is_centered ? (height - place.height) / 2 : 0;
  place.left = is_centered ? (width - place.width) / 2 : 0;
  cv::Mat small;
  const cv::Size size(place.width, place.height);
  cv::resize(picture, small, size, 0, 0, codes.at(interpolation));
  if (image.at("channels") == "RGB") cv::cvtColor(small, small, cv::COLOR_BGR2RGB);
  std::vector<float> planes(size_t(3) * height * width);
  for (int c = 0; c < 3; c++) {
    const bool is_tensor = image.at("kind") == "tensor";
    const float mean = is_tensor ? float(image.at("mean").at(c)) : 0.f;
    const float std = is_tensor ? float(image.at("std").at(c)) : 1.f;
    float* plane = planes.data() + size_t(c) * height * width;
    std::fill_n(plane, size_t(height) * width, float(image.at("padding").at(c)));
    for (int y = 0; y < place.height; y++) {
      float* row = plane + size_t(y + place.top) * width + place.left;
      for (int x = 0; x < place.width; x++) row[x] = (small.at<cv::Vec3b>(y, x)[c] - mean) / std;
    }
  }
  return planes;
}

inline float overlap(const Box& a, const Box& b) {
  const float width = std::min(a.x2, b.x2) - std::max(a.x1, b.x1);
  const float height = std::min(a.y2, b.y2) - std::max(a.y1, b.y1);
  if (width <= 0 || height <= 0) return 0;
  const float shared = width * height;
  return shared / ((a.x2 - a.x1) * (a.y2 - a.y1) + (b.x2 - b.x1) * (b.y2 - b.y1) - shared);
}

// Move boxes to the picture, clip them, and keep the best after NMS. Without labels, scores has one
// for each class of each box.
inline std::vector<Box> read_boxes(const json& description, const float* boxes, const float* scores,
                                   const int* labels, int rows, int classes, const Place& place,
                                   const cv::Size& size, float least) {
  const json& test = description.at("test_cfg");
  const json& about = description.at("outputs").at(0);
  const std::vector<float> scale = about.at("scale");
  const float threshold = test.value("score_thr", 0.f), small = test.value("min_bbox_size", -1.f);
  const float iou = test.at("nms").at("iou_threshold");
  const size_t most = test.at("max_per_img");
  const bool clips = test.value("clip_border", true);
  if (about.at("box_format") != "xyxy" || scale.size() != 4)
    throw std::runtime_error("boxes of another format");
  std::vector<Box> candidates, kept;
  for (int i = 0; i < rows; i++) {
    for (int k = 0; k < classes; k++) {
      const float score = scores[size_t(i) * classes + k];
      if (!(score > threshold && score >= least)) continue;
      const float* box = boxes + size_t(i) * 4;
      const auto x = [&](int j) {
        const float value = box[j] * scale[j] - place.left;
        return clips ? std::min(std::max(value, 0.f), float(place.width)) : value;
      };
      const auto y = [&](int j) {
        const float value = box[j] * scale[j] - place.top;
        return clips ? std::min(std::max(value, 0.f), float(place.height)) : value;
      };
      const Box found = {x(0), y(1), x(2), y(3), score, labels ? labels[i] : k};
      if (found.x2 - found.x1 > small && found.y2 - found.y1 > small) candidates.push_back(found);
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Box& a, const Box& b) { return a.score > b.score; });
  for (const Box& box : candidates) {
    if (kept.size() == most) break;
    if (std::none_of(kept.begin(), kept.end(), [&](const Box& better) {
          return better.label == box.label && overlap(better, box) > iou;
        }))
      kept.push_back(box);
  }
  const float across = float(size.width) / place.width, down = float(size.height) / place.height;
  for (Box& box : kept) box = {box.x1 * across, box.y1 * down, box.x2 * across, box.y2 * down,
                               box.score, box.label};
  return kept;
}

// Print a line for each box: x1, y1, x2, y2, score, class.
inline void print(const json& description, const std::vector<Box>& boxes) {
  const json classes = description.value("classes", json::array());
  for (const Box& box : boxes) {
    std::string name = std::to_string(box.label);
    if (size_t(box.label) < classes.size()) name = classes[box.label].dump();  // escapes controls
    std::printf("%.3f %.3f %.3f %.3f %.5f %s\n", box.x1, box.y1, box.x2, box.y2, box.score,
                name.c_str());
  }
}

}  // namespace mmcare
